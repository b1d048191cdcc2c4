-- name: vacuum_due
-- Whether the hot table was vacuumed less recently than $1 seconds ago, by anybody. Index: none (statistics).
select coalesce(extract(epoch from clock_timestamp() - greatest(last_vacuum, last_autovacuum)) > $1, true)
from pg_stat_user_tables where schemaname = current_schema() and relname = 'agent_sched';

-- name: vacuum_hot_table
-- Prunes dead index entries at the head of the claim scan; TRUNCATE OFF takes no exclusive lock. Index: all of agent_sched.
vacuum (truncate off) agent_sched;

-- name: oldest_xmin
-- Age in seconds of the oldest transaction that holds vacuum back. Index: none (system view).
select coalesce(max(extract(epoch from clock_timestamp() - coalesce(xact_start, query_start))), 0)::float8
from pg_stat_activity where backend_xmin is not null and pid <> pg_backend_pid();

-- name: orphans
-- Agents held by a worker that is not live, and the seconds since the first of those workers ended. What the sweep of
-- orphans releases within a second is 0 nearly always. Index: agent_sched_worker, workers_pkey.
select count(*)::bigint as agents, coalesce(max(extract(epoch from clock_timestamp() - w.ended_at)), 0)::float8 as oldest_s
from agent_sched s left join workers w on w.id = s.worker_id
where s.worker_id = any(array(
  select distinct h.worker_id from agent_sched h
  where h.worker_id is not null
    and not exists (select from workers l where l.id = h.worker_id and l.state = 'live')));

-- name: notify_queue
-- Use of the NOTIFY queue, 0 to 1. Index: none.
select pg_notification_queue_usage();
