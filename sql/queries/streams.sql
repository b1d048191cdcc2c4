-- name: page
-- Up to $3 events of one agent after sequence $2, fewer when together they pass $4 stored bytes, beside the head of its
-- log; one row with null event columns when there is no such event, no row when there is no such agent.
-- Index: agent_sched_pkey, events_pkey.
select s.next_sequence - 1 as head, s.gate = 'archived' as archived,
       e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.payload, e.created_at
from agent_sched s
left join lateral (
  select p.*, sum(pg_column_size(p.payload)) over (order by p.sequence) - pg_column_size(p.payload) as bytes_before
  from (select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at
          from events where agent_id = s.agent_id and sequence > $2 order by sequence limit $3) p
) e on e.bytes_before < $4
where s.agent_id = $1
order by e.sequence;

-- name: news
-- Of these agents ($1), those whose log goes beyond what their readers have seen ($2), or that were archived.
-- Index: agent_sched_pkey.
select u.agent_id
from unnest($1::uuid[], $2::bigint[]) as u (agent_id, seen)
join agent_sched s on s.agent_id = u.agent_id
where s.next_sequence - 1 > u.seen or s.gate = 'archived';

-- name: usable_keys
-- Of these credentials ($1), those that still authenticate.
-- Index: personal_access_tokens_pkey, org_api_keys_pkey, users_pkey.
select t.id
from personal_access_tokens t join users u on u.id = t.user_id
where t.id = any($1::uuid[]) and t.revoked_at is null and u.deleted_at is null
union all
select k.id from org_api_keys k where k.id = any($1::uuid[]) and k.revoked_at is null;
