-- name: here
-- The present moment in the order of commits: the transactions that are visible now, when, and in which database.
select pg_current_snapshot()::text as snapshot, statement_timestamp() as taken_at,
       substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as timeline,
       (select system_identifier from pg_control_system())::text || '/' || d.oid as database
from pg_database d where d.datname = current_database();

-- name: project_changes
-- Agents of project $1 after agent $2 (at most $3) whose logs grew since snapshot $4 (null: ever), taken at $5 in timeline
-- $6, with the last sequence before and the last one now (or in snapshot $7, taken at $8 in this timeline). What is an
-- hour older than a snapshot counts as seen by it, whatever its transaction; in another timeline, where transaction ids
-- mean nothing, what is a minute older. A hot row changes in each transaction that appends, so one that the snapshot saw
-- has nothing new. Beside them the present moment; one row with nulls when there is no such agent.
-- Index: agents_project_id_idempotency_key_key, agent_sched_pkey, events_pkey (backwards, to the first that was seen).
with s as (
  select pg_current_snapshot()::text as snapshot, statement_timestamp() as taken_at,
         pg_snapshot_xmax(pg_current_snapshot())::text::bigint as top,
         substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) as timeline
),
x as (
  select s.*, s.top % 4294967296 as top32, s.top - s.top % 4294967296 as epoch, s.timeline = $6::text as same,
         $5::timestamptz - case when s.timeline = $6::text then interval '1 hour' else interval '1 minute' end as seen_before
  from s
)
select x.snapshot, x.taken_at, x.timeline, g.agent_id, g.low, g.high
from x left join lateral (
  select h.agent_id,
    case when $4::text is null then 0 else coalesce((
      select e.sequence from events e
      where e.agent_id = h.agent_id and e.sequence < h.next_sequence
        and (e.created_at < x.seen_before or (x.same and pg_visible_in_snapshot(
          (x.epoch + e.xmin::text::bigint - case when e.xmin::text::bigint > x.top32 then 4294967296 else 0 end)::text::xid8,
          $4::text::pg_snapshot)))
      order by e.sequence desc limit 1), 0) end as low,
    case when $7::text is null then h.next_sequence - 1 else coalesce((
      select e.sequence from events e
      where e.agent_id = h.agent_id and e.sequence < h.next_sequence
        and (e.created_at < $8::timestamptz - interval '1 hour' or pg_visible_in_snapshot(
          (x.epoch + e.xmin::text::bigint - case when e.xmin::text::bigint > x.top32 then 4294967296 else 0 end)::text::xid8,
          $7::text::pg_snapshot))
      order by e.sequence desc limit 1), 0) end as high
  from agents a join agent_sched h on h.agent_id = a.id
  where a.project_id = $1 and a.id > $2
    and ($4::text is null or not x.same or not pg_visible_in_snapshot(
      (x.epoch + h.xmin::text::bigint - case when h.xmin::text::bigint > x.top32 then 4294967296 else 0 end)::text::xid8,
      $4::text::pg_snapshot))
  order by a.id limit $3
) g on true
order by g.agent_id;

-- name: events_of_ranges
-- The events of agents $1 after sequences $2 up to sequences $3, agent by agent, at most $4 rows, fewer when together they
-- pass $5 bytes (see `events_after`). Index: events_pkey.
select p.agent_id, p.sequence, p.id, p.kind, p.turn_id, p.turn_sequence, p.is_opening, p.payload, p.created_at
from (
  select z.*, sum(z.size) over (order by z.place, z.sequence) - z.size as bytes_before
  from (
   select y.*, case when pg_column_compression(y.payload) is null then y.stored
                    else octet_length(y.payload::text) end as size
   from (
    select q.*, sum(q.stored) over (order by q.place, q.sequence) - q.stored as stored_before
    from (
    select r.place, e.agent_id, e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.payload, e.created_at,
           pg_column_size(e.payload) as stored
    from unnest($1::uuid[], $2::bigint[], $3::bigint[]) with ordinality as r (agent_id, low, high, place)
    cross join lateral (
      select * from events v where v.agent_id = r.agent_id and v.sequence > r.low and v.sequence <= r.high
      order by v.sequence limit $4
    ) e
    order by r.place, e.sequence limit $4
    ) q
   ) y where y.stored_before < $5
  ) z
) p
where p.bytes_before < $5
order by p.place, p.sequence;

-- name: projects_of
-- The projects of these agents. Index: agent_sched_pkey.
select agent_id, project_id from agent_sched where agent_id = any($1::uuid[]);
