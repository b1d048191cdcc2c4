-- name: find_interaction
-- One form with the call it belongs to. Index: interactions_pkey, tool_calls_agent_id_id_key.
select i.id, i.agent_id, i.tool_call_id, i.kind, i.state, i.request, i.resolution, i.resolved_by_input_id, i.resolved_by,
       i.reason, i.created_at, i.resolved_at
from interactions i where i.agent_id = $1 and i.id = $2;

-- name: resolve_interaction
-- Record the answer to an open form. The hot row is locked. Index: interactions_pkey.
update interactions set state = 'resolved', resolution = $3::json, resolved_by_input_id = $4, resolved_by = $5,
  resolved_at = statement_timestamp()
where agent_id = $1 and id = $2 and state = 'open'
returning id, agent_id, tool_call_id, kind, state, request, resolution, resolved_by_input_id, resolved_by, reason,
  created_at, resolved_at;

-- name: open_interactions
-- The open forms of an agent. The hot row is locked. Index: interactions_pkey.
select id, agent_id, tool_call_id, kind, state, request, resolution, resolved_by_input_id, resolved_by, reason, created_at,
       resolved_at
from interactions where agent_id = $1 and state = 'open' order by created_at, id;

-- name: cancel_interactions
-- Cancel open forms, naming the input that made them pointless. The hot row is locked. Index: interactions_pkey.
update interactions set state = 'canceled', resolved_by_input_id = $3, reason = $4, resolved_at = statement_timestamp()
where agent_id = $1 and state = 'open' and ($2::uuid[] is null or tool_call_id = any($2::uuid[]))
returning id;

-- name: insert_interaction
-- Open a form for a call. The hot row is locked.
insert into interactions (agent_id, id, tool_call_id, kind, request) values ($1, $2, $3, $4, $5::json);

-- name: was_asked
-- Whether a person was asked to allow a call. Index: interactions_agent_id_tool_call_id_kind_key.
select exists (select from interactions where agent_id = $1 and tool_call_id = $2 and kind = 'permission');

-- name: list_interactions
-- Forms, oldest first, after a (time, id) key; `state` is null when absent. Index: interactions_pkey.
select id, agent_id, tool_call_id, kind, state, request, resolution, resolved_by_input_id, resolved_by, reason, created_at,
       resolved_at
from interactions
where agent_id = $1 and ($2::text is null or state = $2)
  and ($3::timestamptz is null or (created_at, id) > ($3, $4::uuid))
order by created_at, id limit $5;
