-- name: register_worker
-- A new identity with a lease of $5 seconds. Index: workers_pkey.
insert into workers (id, lock_key, roles, version, lease_expires_at)
values ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5));

-- name: renew_lease
-- Extend the lease of a live worker; no row means that somebody declared it dead. Index: workers_pkey.
update workers set lease_expires_at = greatest(lease_expires_at, clock_timestamp() + make_interval(secs => $2))
where id = $1 and state = 'live' returning id;

-- name: reattach_worker
-- Take the identity up again after a lost session; no row means declared dead. Index: workers_pkey.
update workers
set attached_at = clock_timestamp(),
    lease_expires_at = greatest(lease_expires_at, clock_timestamp() + make_interval(secs => $2))
where id = $1 and state = 'live' returning id;

-- name: stop_worker
-- An orderly end: the worker holds no claims any more. Index: workers_pkey.
update workers set state = 'stopped', ended_at = clock_timestamp() where id = $1 and state = 'live';

-- name: probe_workers
-- All live workers, $1 (the one that asks) among them. Of the others: have they lost every connection, so that their lock
-- can be taken? The locks are released with the statement's transaction. Of all: what is left of the lease. Never waits.
-- Index: workers_live.
select id, case when id <> $1 then pg_try_advisory_xact_lock(lock_key) else false end as gone,
       extract(epoch from lease_expires_at - clock_timestamp())::float8 as left_s, lease_expires_at, attached_at
from workers where state = 'live';

-- name: declare_dead
-- First of two statements: mark workers dead. The key is held exclusively while the row changes, so that a worker that
-- re-attaches at this moment and this statement cannot both win. Those whose lease ran out ($2, and its end as it was
-- seen, $3) may still hold their lock: they have `lapsed`, which is a lost lease and does not count as a death for their
-- agents. A renewal under way is waited for, and counts. Index: workers_pkey.
with lapsed as (select * from unnest($2::uuid[], $3::timestamptz[]) as l (id, lease_expires_at))
update workers w
set state = case when pg_try_advisory_xact_lock(lock_key) then 'dead' else 'lapsed' end, ended_at = clock_timestamp()
where w.id = any($1::uuid[] || $2::uuid[]) and w.state = 'live'
  and ((w.id = any($1::uuid[]) and pg_try_advisory_xact_lock(lock_key))
       or exists (select from lapsed l where l.id = w.id and l.lease_expires_at = w.lease_expires_at
                                         and w.lease_expires_at < clock_timestamp()))
returning w.id;

-- name: server_start
-- When this Postgres started. After a crash of one of its processes it drops all connections and goes on under the same
-- start; then its counters begin anew, and tell. Within a grace after it nobody is declared dead.
select at, extract(epoch from clock_timestamp() - at)::float8 as age_s
from greatest(pg_postmaster_start_time(), (select stats_reset from pg_stat_bgwriter)) as at;

-- name: note_timeline
-- Keep the timeline of this database and since when it is known to be another one than before: a promotion. The first one
-- that is ever kept counts as having always been. Index: installation_pkey.
insert into installation (name, value, created_at)
values ('timeline', substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), 'epoch')
on conflict (name) do update set value = excluded.value, created_at = clock_timestamp()
where installation.value <> excluded.value;

-- name: timeline_age
-- Seconds since the timeline was found to be another one. Index: installation_pkey.
select extract(epoch from clock_timestamp() - created_at)::float8 as age_s from installation where name = 'timeline';

-- name: forget_workers
-- Drop rows of workers that ended more than a day ago and hold nothing. Index: workers_pkey, agent_sched_worker.
delete from workers w where w.state <> 'live' and w.ended_at < clock_timestamp() - interval '1 day'
  and not exists (select from agent_sched s where s.worker_id = w.id);

-- name: workers_alive
-- How many workers are live (metric). Index: workers_live.
select count(*)::bigint as alive from workers where state = 'live';
