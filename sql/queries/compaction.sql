-- name: last_checkpoint
-- The newest checkpoint at or before sequence $2, whatever the length of the log. Index: events_checkpoints (backwards).
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, meta, replay, created_at
from events where agent_id = $1 and sequence <= $2 and kind = 'context_checkpoint' order by sequence desc limit 1;

-- name: is_due
-- Whether step $2 was a compaction that failed and is to be tried again. Index: steps_pkey.
select kind = 'compaction' and next_action in ('retry', 'fallback') as due
from steps where agent_id = $1 and number = $2;
