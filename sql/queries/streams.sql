-- name: page
-- Up to $3 events of one agent after sequence $2, fewer when together they pass $4 bytes (see `events_after`), beside the
-- head of its log and the id of event $2; one row with null event columns when there is no such event, no row when there is no such agent.
-- Index: agent_sched_pkey, events_pkey.
select s.next_sequence - 1 as head, s.gate,
       (select l.id from events l where l.agent_id = s.agent_id and l.sequence = $2) as last_id,
       e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.payload, e.created_at
from agent_sched s
left join lateral (
  select r.*, sum(r.size) over (order by r.sequence) - r.size as bytes_before
  from (
    select q.*, case when pg_column_compression(q.payload) is null then q.stored
                     else octet_length(q.payload::text) end as size
    from (
      select p.*, sum(p.stored) over (order by p.sequence) - p.stored as stored_before
      from (select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, created_at,
                   pg_column_size(payload) as stored
              from events where agent_id = s.agent_id and sequence > $2 order by sequence limit $3) p
    ) q where q.stored_before < $4
  ) r
) e on e.bytes_before < $4
where s.agent_id = $1
order by e.sequence;

-- name: news
-- Of these agents ($1), those whose log goes beyond what their readers have seen ($2), or that are archived or crashed; or
-- whose log ends before that, since a failover lost its tail.
-- Index: agent_sched_pkey.
select u.agent_id
from unnest($1::uuid[], $2::bigint[]) as u (agent_id, seen)
join agent_sched s on s.agent_id = u.agent_id
where s.next_sequence - 1 <> u.seen or s.gate in ('archived', 'crashed');

-- name: timeline
-- The timeline of this database: a promotion or a restore begins another one.
select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);

-- name: strangers
-- Of these agents ($1), those whose event at sequence $2 has not the id $3 (parallel arrays). Index: events_pkey.
select distinct w.agent_id
from unnest($1::uuid[], $2::bigint[], $3::uuid[]) as w (agent_id, sequence, id)
left join events e on e.agent_id = w.agent_id and e.sequence = w.sequence
where e.id is distinct from w.id;

-- name: still_readable
-- Of these pairs of a credential ($1) and a project ($2), those of which the credential still authenticates and its holder
-- still has a role in the project. Index: personal_access_tokens_pkey, org_api_keys_pkey, users_pkey, project_members_pkey,
-- org_members_pkey, org_api_key_projects_pkey, projects_pkey.
select w.key_id, w.project_id
from unnest($1::uuid[], $2::uuid[]) as w (key_id, project_id)
join projects p on p.id = w.project_id and p.deleted_at is null
where exists (
    select from personal_access_tokens t
    join users u on u.id = t.user_id and u.deleted_at is null
    join project_members e on e.project_id = p.id and e.user_id = u.id
    join org_members m on m.org_id = p.org_id and m.user_id = u.id
    where t.id = w.key_id and t.revoked_at is null)
  or exists (
    select from org_api_keys k
    join org_api_key_projects e on e.key_id = k.id and e.project_id = p.id
    where k.id = w.key_id and k.org_id = p.org_id and k.revoked_at is null and k.org_role is not null);
