-- name: find_input_by_key
-- The input that used an Idempotency-Key on this agent. Index: inputs_key.
select id, agent_id, kind, delivery_mode, state, content, metadata, actor_id, control_type, interaction_id, config_id,
       event_sequence, queued_at
from inputs where agent_id = $1 and idempotency_key = $2;

-- name: receive_input
-- Accept a message: moves the hot row (rank, generation, ready unless calls are open) and inserts the input from it.
-- No row when the key is used or the agent is archived; a rank may then be skipped. Index: agent_sched_pkey, inputs_key.
with h as (
  update agent_sched set
    inputs_gen = inputs_gen + 1, next_rank = next_rank + 1024,
    ready_at = case when open_calls > 0 then ready_at else least(ready_at, statement_timestamp()) end
  where agent_id = $1 and gate <> 'archived'
  returning agent_id, next_rank - 1024 as rank
)
insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content, metadata, actor_id, idempotency_key)
select h.agent_id, $2, 'content', $3, 'received', h.rank, $4::json, $5::json, $6, $7 from h
on conflict (agent_id, idempotency_key) where idempotency_key is not null do nothing
returning id, agent_id, kind, delivery_mode, state, content, metadata, actor_id, control_type, interaction_id, config_id,
  event_sequence, queued_at;

-- name: insert_resolved
-- A control, answer or config change that enters the log in the same transaction. The hot row is locked.
insert into inputs (agent_id, id, kind, delivery_mode, state, rank, metadata, actor_id, control_type, interaction_id,
                    config_id, idempotency_key, event_sequence, resolved_at)
values ($1, $2, $3, 'immediate', 'resolved', 1, $4::json, $5, $6, $7, $8, $9, $10, statement_timestamp())
returning id, agent_id, kind, delivery_mode, state, content, metadata, actor_id, control_type, interaction_id, config_id,
  event_sequence, queued_at;

-- name: insert_received
-- A message at a given rank. The hot row is locked, or nobody else can see the agent yet (launch).
insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content, metadata, actor_id, idempotency_key)
values ($1, $2, 'content', $3, 'received', $4, $5::json, $6::json, $7, $8)
returning id, agent_id, kind, delivery_mode, state, content, metadata, actor_id, control_type, interaction_id, config_id,
  event_sequence, queued_at;

-- name: cancel_waiting
-- Cancel received inputs of the given delivery modes. The hot row is locked. Index: inputs_waiting.
update inputs set state = 'canceled', resolved_at = statement_timestamp()
where agent_id = $1 and state = 'received' and delivery_mode = any($2::text[])
returning id;

-- name: has_waiting
-- Whether any input of this agent waits to be admitted. Index: inputs_waiting.
select exists (select from inputs where agent_id = $1 and state = 'received') as waiting;
