-- name: read_events
-- The log from sequence $2 on, oldest first, at most $3 rows. Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, meta, replay, created_at
from events where agent_id = $1 and sequence >= $2 order by sequence limit $3;

-- name: read_open_calls
-- The calls without a result of the output at sequence $2. Index: tool_calls_pkey.
select id, ordinal, name, type, input, state
from tool_calls where agent_id = $1 and output_sequence = $2 and state <> 'completed' order by ordinal;

-- name: read_for_step
-- What a step needs, in one visit: the log from sequence $2 to $3 (at most $4 rows, part 0), all received steering inputs
-- (part 1) and the first two queued ones (part 2). Index: events_pkey, inputs_waiting.
(select 0 as part, sequence as number, id, kind, turn_id, turn_sequence, is_opening, payload, meta, replay, created_at,
        null::text as idempotency_key
   from events where agent_id = $1 and sequence between $2 and $3 order by sequence limit $4)
union all
(select 1, rank, id, delivery_mode, actor_id, null, false, content, null, null, queued_at, idempotency_key
   from inputs where agent_id = $1 and state = 'received' and delivery_mode = 'steering' order by rank, id)
union all
(select 2, rank, id, delivery_mode, actor_id, null, false, content, null, null, queued_at, idempotency_key
   from inputs where agent_id = $1 and state = 'received' and delivery_mode = 'queued' order by rank, id limit 2)
order by 1, 2, 3;

-- name: step_config
-- The config under which step $2 ran. Index: steps_pkey.
select config_id from steps where agent_id = $1 and number = $2;

-- name: read_config
-- The compiled definition of a config. Immutable, so callers may cache it for ever. Index: agent_configs_pkey.
select id, project_id, definition, configured_model_id from agent_configs where id = $1;
