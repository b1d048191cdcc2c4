-- name: read_events
-- The log from sequence $2 on, oldest first, at most $3 rows. Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, meta, replay, created_at
from events where agent_id = $1 and sequence >= $2 order by sequence limit $3;

-- name: read_open_calls
-- The calls without a result of the output at sequence $2. Index: tool_calls_pkey.
select id, ordinal, name, type, input, state
from tool_calls where agent_id = $1 and output_sequence = $2 and state <> 'completed' order by ordinal;

-- name: read_waiting_inputs
-- All received steering inputs and the first two queued ones, in order of rank. Index: inputs_waiting.
(select id, delivery_mode, rank, content, actor_id, idempotency_key from inputs
  where agent_id = $1 and state = 'received' and delivery_mode = 'steering' order by rank, id)
union all
(select id, delivery_mode, rank, content, actor_id, idempotency_key from inputs
  where agent_id = $1 and state = 'received' and delivery_mode = 'queued' order by rank, id limit 2);

-- name: step_config
-- The config under which step $2 ran. Index: steps_pkey.
select config_id from steps where agent_id = $1 and number = $2;

-- name: read_config
-- The compiled definition of a config. Immutable, so callers may cache it for ever. Index: agent_configs_pkey.
select id, project_id, definition, configured_model_id from agent_configs where id = $1;
