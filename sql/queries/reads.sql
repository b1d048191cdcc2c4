-- name: events_after
-- A page of the log after sequence $2, oldest first: up to $3 events, fewer when together they pass $4 bytes. First by what
-- is stored, which costs nothing to know, then by what that is unpacked: what compresses well is not unpacked by the
-- hundred. `found` says how many there were, up to $3. Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at, found
from (
  select r.*, sum(r.size) over (order by sequence) - r.size as bytes_before
  from (
    select q.*, case when pg_column_compression(payload) is null then stored else octet_length(payload::text) end as size
    from (
      select p.*, sum(p.stored) over (order by sequence) - p.stored as stored_before, count(*) over () as found
      from (select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at,
                   pg_column_size(payload) as stored
              from events where agent_id = $1 and sequence > $2 order by sequence limit $3) p
    ) q where stored_before < $4
  ) r
) t where bytes_before < $4 order by sequence;

-- name: events_before
-- A page of the log before sequence $2, newest first, with the same bounds. Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at, found
from (
  select r.*, sum(r.size) over (order by sequence desc) - r.size as bytes_before
  from (
    select q.*, case when pg_column_compression(payload) is null then stored else octet_length(payload::text) end as size
    from (
      select p.*, sum(p.stored) over (order by sequence desc) - p.stored as stored_before, count(*) over () as found
      from (select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at,
                   pg_column_size(payload) as stored
              from events where agent_id = $1 and sequence < $2 order by sequence desc limit $3) p
    ) q where stored_before < $4
  ) r
) t where bytes_before < $4 order by sequence desc;

-- name: turn_bounds
-- Where a turn starts and (exclusive) ends; the end of the last turn is null. Index: turns_agent_id_id_key, turns_pkey.
select t.turn_sequence, t.first_sequence,
       (select n.first_sequence from turns n
         where n.agent_id = t.agent_id and n.turn_sequence > t.turn_sequence order by n.turn_sequence limit 1) as until
from turns t where t.agent_id = $1 and t.id = $2;

-- name: turn_events
-- A page of one turn's events before sequence $3 and from $2 on, newest first; up to $4, or $5 bytes, as above.
-- Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at, found
from (
  select r.*, sum(r.size) over (order by sequence desc) - r.size as bytes_before
  from (
    select q.*, case when pg_column_compression(payload) is null then stored else octet_length(payload::text) end as size
    from (
      select p.*, sum(p.stored) over (order by sequence desc) - p.stored as stored_before, count(*) over () as found
      from (select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at,
                   pg_column_size(payload) as stored
              from events where agent_id = $1 and sequence >= $2 and sequence < $3 order by sequence desc limit $4) p
    ) q where stored_before < $5
  ) r
) t where bytes_before < $5 order by sequence desc;

-- name: list_turns
-- Turns before turn $2, newest first, with the sequences of their noteworthy events. A turn's openings stand together at
-- its start, so the first event that is none ends them. Index: turns_pkey, events_pkey.
select t.turn_sequence, t.id, t.started_at, t.first_sequence, b.until,
       coalesce((select o.sequence from events o
                  where o.agent_id = t.agent_id and o.sequence >= t.first_sequence and o.sequence < b.until
                    and not o.is_opening order by o.sequence limit 1), b.until) as openings_until,
       (select e.sequence from events e
         where e.agent_id = t.agent_id and e.sequence >= t.first_sequence and e.sequence < b.until and e.is_semantic
         order by e.sequence desc limit 1) as latest_semantic
from (select * from turns where agent_id = $1 and turn_sequence < $2 order by turn_sequence desc limit $3) t
cross join lateral (
  select coalesce((select n.first_sequence from turns n
                    where n.agent_id = t.agent_id and n.turn_sequence > t.turn_sequence
                    order by n.turn_sequence limit 1),
                  (select s.next_sequence from agent_sched s where s.agent_id = t.agent_id)) as until) b
order by t.turn_sequence desc;

-- name: events_at
-- The events with the given sequences, oldest first. Index: events_pkey.
select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at
from events where agent_id = $1 and sequence = any($2::bigint[]) order by sequence;

-- name: events_of_turns
-- The events with sequences $2, which are noteworthy in the turns $3 (parallel, newest turn first): of whole turns only, as
-- many as do not pass $4 bytes together with those before them, and at least one. Bounded as above. Index: events_pkey.
select turn, sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at
from (
  select r.*, sum(r.size) over (order by turn desc) - sum(r.size) over (partition by turn) as bytes_before
  from (
    select q.*, case when pg_column_compression(payload) is null then stored else octet_length(payload::text) end as size
    from (
      select p.*, sum(p.stored) over (order by turn desc) - sum(p.stored) over (partition by turn) as stored_before
      from (select w.turn, e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.payload, e.created_at,
                   pg_column_size(e.payload) as stored
              from unnest($2::bigint[], $3::bigint[]) as w (sequence, turn)
              join events e on e.agent_id = $1 and e.sequence = w.sequence) p
    ) q where stored_before < $4
  ) r
) t where bytes_before < $4 order by turn desc, sequence;

-- name: agent_status
-- What the flat API says of an agent besides its output. Index: agent_sched_pkey, steps_pkey.
select o.status, o.name, o.model, o.temperature, o.system_prompt, o.last_step, o.last_sequence, o.turns, o.open_calls,
       o.deaths, o.created_at, o.updated_at, o.archived_at, st.kind as step_kind, st.state as step_state,
       st.attempt as step_attempt, st.started_at as step_started_at, st.finished_at as step_finished_at, st.next_action,
       st.error as step_error, st.retry_at as step_retry_at, s.turn_open, s.retry_at
from agents_overview o
join agent_sched s on s.agent_id = o.agent_id
left join steps st on st.agent_id = o.agent_id and st.number = o.last_step
where o.agent_id = $1;

-- name: last_output
-- The newest model output with text that is not voided. Reads backwards from the end of the log, and looks into damaged
-- rows without failing. Index: events_pkey, agent_sched_pkey.
select e.payload
from agent_sched s join events e on e.agent_id = s.agent_id
where s.agent_id = $1 and e.kind = 'model_output' and not s.void @> e.sequence
  and case when json_typeof(e.payload -> 'content_blocks') = 'array'
           then exists (select from json_array_elements(e.payload -> 'content_blocks') b where b ->> 'type' = 'text')
           else false end
order by e.sequence desc limit 1;

-- name: usage_sums
-- Tokens of all steps of an agent, by whatever counters their usage holds: what was kept of them, and the sums over the
-- steps after that. Beside it the last step that is over, the first that is not, and how many were added up.
-- A stored count may be absurd; a sum ends at 2^53 - 1, the largest integer that every reader of JSON keeps exact.
-- Without an upper end the planner takes the new steps for a third of the table, and reads all of it.
-- Index: agent_usage_pkey, steps_pkey, agent_sched_pkey.
with kept as materialized (select through, sums from agent_usage where agent_id = $1),
fresh as materialized (
  select number, state, usage from steps
  where agent_id = $1 and number > coalesce((select through from kept), 0)
    and number <= (select step_number from agent_sched where agent_id = $1)
)
select (select sums from kept) as kept,
       (select json_object_agg(t.key, t.total) from (
          select u.key, least(sum(greatest((u.value #>> '{}')::numeric, 0)), 9007199254740991)::bigint as total
          from fresh f, json_each(f.usage) u
          where json_typeof(f.usage) = 'object' and json_typeof(u.value) = 'number' group by u.key) t) as added,
       (select max(number) from fresh where state <> 'started') as over,
       (select min(number) from fresh where state = 'started') as under_way,
       (select count(*) from fresh) as steps;

-- name: keep_usage
-- Keep the sums ($3) up to step $2, unless somebody has kept later ones. Index: agent_usage_pkey.
insert into agent_usage (agent_id, through, sums) values ($1, $2, $3::json)
on conflict (agent_id) do update set through = excluded.through, sums = excluded.sums
where agent_usage.through < excluded.through;

-- name: list_steps
-- The journal of an agent after step $2, oldest first, for people. Index: steps_pkey.
select step, "timestamp", finished_at, kind, attempt, status, tool_request, tool_response, llm_output, next_action,
       secrets_used, error, usage
from agent_steps where agent_id = $1 and step > $2 order by step limit $3;

-- name: list_overview
-- Agents of a project that are not archived, with their status, newest first, after a (time, id) key; `$2` is a status or
-- null. Index: agents_newest for the order; the status is derived.
select agent_id, name, status, model, last_step, last_sequence, turns, open_calls, deaths, created_at, updated_at,
       archived_at
from agents_overview
where project_id = $1 and archived_at is null and ($2::text is null or status = $2)
  and ($3::timestamptz is null or (created_at, agent_id) < ($3, $4::uuid))
order by created_at desc, agent_id desc limit $5;

-- name: list_overview_archived
-- Archived agents of a project in the same order; `$2` says nothing more. Index: agents_archived.
select agent_id, name, status, model, last_step, last_sequence, turns, open_calls, deaths, created_at, updated_at,
       archived_at
from agents_overview
where project_id = $1 and archived_at is not null and $2::text = 'archived'
  and ($3::timestamptz is null or (created_at, agent_id) < ($3, $4::uuid))
order by created_at desc, agent_id desc limit $5;

-- name: diagnosis
-- Facts about a crashed agent: deaths in a row and the newest failed step's error. Index: agent_sched_pkey, steps_pkey.
select s.deaths, (select st.error from steps st
                   where st.agent_id = s.agent_id and st.number > s.step_number - 20 and st.error is not null
                   order by st.number desc limit 1) as error
from agent_sched s where s.agent_id = $1;

-- name: list_agents_created_desc
-- Active agents of a project by created_at desc, after a (created_at, id) key; `$2` is a pattern or null. Index: agents_newest.
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::timestamptz is null or (a.created_at, a.id) < ($3, $4::uuid))
order by a.created_at desc, a.id desc limit $5;

-- name: list_agents_created_asc
-- Active agents of a project by created_at asc, after a (created_at, id) key; `$2` is a pattern or null. Index: agents_newest (scan of the project).
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::timestamptz is null or (a.created_at, a.id) > ($3, $4::uuid))
order by a.created_at asc, a.id asc limit $5;

-- name: list_agents_updated_desc
-- Active agents of a project by updated_at desc, after a (updated_at, id) key; `$2` is a pattern or null. Index: agents_newest (scan of the project).
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::timestamptz is null or (a.updated_at, a.id) < ($3, $4::uuid))
order by a.updated_at desc, a.id desc limit $5;

-- name: list_agents_updated_asc
-- Active agents of a project by updated_at asc, after a (updated_at, id) key; `$2` is a pattern or null. Index: agents_newest (scan of the project).
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::timestamptz is null or (a.updated_at, a.id) > ($3, $4::uuid))
order by a.updated_at asc, a.id asc limit $5;

-- name: list_agents_name_desc
-- Active agents of a project by name desc, after a (name, id) key; `$2` is a pattern or null. Index: agents_newest (scan of the project).
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::text is null or (a.name, a.id) < ($3, $4::uuid))
order by a.name desc, a.id desc limit $5;

-- name: list_agents_name_asc
-- Active agents of a project by name asc, after a (name, id) key; `$2` is a pattern or null. Index: agents_newest (scan of the project).
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.project_id = $1 and a.archived_at is null and ($2::text is null or a.name ilike $2)
  and ($3::text is null or (a.name, a.id) > ($3, $4::uuid))
order by a.name asc, a.id asc limit $5;
