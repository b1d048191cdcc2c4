-- name: find_agent
-- One agent with what a permission check and a reply need. Index: agents_pkey.
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.id = $1;

-- name: locate_agent
-- Where an agent belongs: all that a permission check needs. Index: agents_pkey.
select id, org_id, project_id, current_config_id from agents where id = $1;

-- name: locate_open_agent
-- The same, unless its project is deleted. Index: agents_pkey, projects_pkey.
select a.id, a.org_id, a.project_id, a.current_config_id
from agents a join projects p on p.id = a.project_id and p.deleted_at is null where a.id = $1;

-- name: find_agent_by_key
-- The agent that an Idempotency-Key launched. Index: agents_project_id_idempotency_key_key.
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.idempotency_key = $2;

-- name: insert_agent
-- A new agent; no row when its key is taken (waits for the other transaction first), or when its project is deleted, also
-- by a transaction that it waited for. Index: unique key of agents, projects_pkey.
insert into agents (id, org_id, project_id, name, current_config_id, idempotency_key)
select $1::uuid, $2::uuid, p.id, $4::text, $5::uuid, $6::text
from (select id from projects where id = $3 and deleted_at is null for key share) p
on conflict (project_id, idempotency_key) do nothing
returning id, created_at;

-- name: insert_hot_row
-- The scheduler's row of a new agent, before any event.
insert into agent_sched (agent_id, project_id, config_id) values ($1, $2, $3);

-- name: lock_hot_row
-- Lock one agent against every other writer; the first statement of each transaction that touches an agent.
-- Index: agent_sched_pkey.
select agent_id, project_id, gate, worker_id, next_sequence, next_rank, turn_id, turn_sequence, turn_open, batch_sequence,
       open_calls, attempt, retry_at, step_number, deaths, history_version, config_id
from agent_sched where agent_id = $1 for no key update;

-- name: write_hot_row
-- Write a locked hot row back. `$14` wake: ready now (or earlier), sleep: nothing to do, keep: as it is. `$15`: the claim
-- is taken away. The generation always moves, so that a claim holder looks again. Index: agent_sched_pkey.
update agent_sched set
  gate = $2, next_sequence = $3, next_rank = $4, turn_id = $5, turn_sequence = $6, turn_open = $7, batch_sequence = $8,
  open_calls = $9, attempt = $10, retry_at = $11, deaths = $12, history_version = $13,
  ready_at = case $14::text when 'wake' then least(ready_at, statement_timestamp())
                            when 'sleep' then null else ready_at end,
  worker_id = case when $15 then null else worker_id end,
  claim_token = case when $15 then null else claim_token end,
  epoch = epoch + case when $15 then 1 else 0 end,
  config_id = $16,
  inputs_gen = inputs_gen + 1
where agent_id = $1;

-- name: write_claimed_row
-- The end of the log and the open calls, after results that the claim holder itself wrote: nobody has to look again, so the
-- generation stays. The hot row is locked; the statement carries the claim all the same. Index: agent_sched_pkey.
update agent_sched set next_sequence = $2, batch_sequence = $3, open_calls = $4
where agent_id = $1 and worker_id = $5 and claim_token = $6 and epoch = $7
returning agent_id;

-- name: touch_agent
-- Note that an agent changed, and point it at a config. The hot row is locked. Index: agents_pkey.
update agents set current_config_id = $2, updated_at = statement_timestamp() where id = $1;

-- name: archive_agent
-- Mark an agent archived. The hot row is locked. Index: agents_pkey.
update agents set archived_at = statement_timestamp(), updated_at = statement_timestamp()
where id = $1 and archived_at is null;

-- name: append_events
-- Append events to a locked agent's log, in the order of the arrays. Index: events_pkey.
insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload)
select $1, e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.is_semantic, e.payload::json
from unnest($2::bigint[], $3::uuid[], $4::text[], $5::uuid[], $6::bigint[], $7::boolean[], $8::boolean[], $9::text[])
  as e (sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload)
returning created_at;

-- name: open_turns
-- Record new turns of a locked agent. Index: turns_pkey.
insert into turns (agent_id, turn_sequence, id, first_sequence)
select $1, t.turn_sequence, t.id, t.first_sequence
from unnest($2::bigint[], $3::uuid[], $4::bigint[]) as t (turn_sequence, id, first_sequence);

-- name: cancel_started_steps
-- Close the step that a claim holder was in; its work is taken away. The hot row is locked. Index: steps_pkey.
update steps set state = 'canceled', finished_at = statement_timestamp(), next_action = 'canceled'
where agent_id = $1 and number = $2 and state = 'started';

-- name: void_ranges
-- The ranges that the fold of this agent's log skips, each from .. to (exclusive). Index: agent_sched_pkey.
select lower(r.range) as first, upper(r.range) as until
from agent_sched s, unnest(s.void) as r (range) where s.agent_id = $1 order by 1;

-- name: add_void
-- Make the fold skip further ranges (arrays of firsts and exclusive ends). The hot row is locked. Index: agent_sched_pkey.
update agent_sched set void = void + (
  select range_agg(int8range(v.first, v.until)) from unnest($2::bigint[], $3::bigint[]) as v (first, until))
where agent_id = $1;
