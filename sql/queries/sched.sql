-- name: claim_longest
-- Which agents a claim takes: up to $2 of those that have been ready longest. $3 is the lower bound of the scan (the last
-- claimed ready_at minus 1 s, or -infinity once a second): dead index entries before it are not walked.
-- Suspects (agents whose last two workers died) are taken only when $6, one at a time.
-- Index: agent_sched_ready.
c as materialized (
  select s.agent_id from agent_sched s, w
  where s.worker_id is null and s.gate = 'open' and s.ready_at >= $3 and s.ready_at <= statement_timestamp()
    and (s.deaths <= 1 or ($6 and s.agent_id = any(array(
      select p.agent_id from agent_sched p
      where p.worker_id is null and p.gate = 'open' and p.ready_at >= $3 and p.ready_at <= statement_timestamp()
        and p.deaths > 1
      order by p.ready_at, p.agent_id limit 1 for no key update skip locked))))
  order by s.ready_at, s.agent_id limit $2
  for no key update of s skip locked
)

-- name: claim_in_turn
-- Which agents a claim takes while there are more than can run: equal shares of the projects that come after project $3
-- (by id), of each those that have been ready longest. Walks the index from project to project, at most $2 of them.
-- Suspects are left to the other kind of claim. Index: agent_sched_project.
p as (
  (select s.project_id, 1 as place from agent_sched s
   where s.worker_id is null and s.gate = 'open' and s.ready_at <= statement_timestamp() and s.project_id > $3
   order by s.project_id limit 1)
  union all
  (select n.project_id, p.place + 1 from p, lateral (
     select s.project_id from agent_sched s
     where s.worker_id is null and s.gate = 'open' and s.ready_at <= statement_timestamp()
       and s.project_id > p.project_id
     order by s.project_id limit 1) n
   where p.place < $2)
),
c as materialized (
  select t.agent_id
  from p, lateral (
    select s.agent_id from agent_sched s, w
    where s.worker_id is null and s.gate = 'open' and s.project_id = p.project_id
      and s.ready_at <= statement_timestamp() and s.deaths <= 1
    order by s.ready_at, s.agent_id limit greatest(1, $2 / (select count(*) from p))
    for no key update of s skip locked) t
)

-- name: claim
-- Take the agents of `c`, as live worker $1.
-- Told along, to spare the run a read: the id of the log's last event, and up to three waiting inputs (contents of at most
-- $5 bytes). They and `inputs_gen` are read in the statement's snapshot, which may be older than the row that was locked:
-- then the save that relies on them finds a newer `inputs_gen` and begins nothing.
-- Index: agent_sched_pkey, events_pkey, inputs_waiting.
update agent_sched s
set worker_id = $1, claim_token = $4, epoch = s.epoch + 1, ready_at = null
from (select s0.agent_id, s0.ready_at, s0.inputs_gen from agent_sched s0 where s0.agent_id = any(array(select agent_id from c))) was
where s.agent_id = was.agent_id
returning s.agent_id, s.project_id, s.claim_token, s.epoch,
  extract(epoch from statement_timestamp() - was.ready_at)::float8 as waited_s,
  s.next_sequence, was.inputs_gen, s.turn_id, s.turn_sequence, s.turn_open, s.batch_sequence, s.open_calls, s.attempt,
  s.step_number, s.deaths, s.history_version, s.void, s.config_id,
  extract(epoch from s.retry_at - statement_timestamp())::float8 as retry_in_s, was.ready_at,
  (select e.id from events e where e.agent_id = s.agent_id and e.sequence = s.next_sequence - 1) as head_id,
  array(select row(n.id, n.delivery_mode, n.rank, case when pg_column_size(n.content) <= $5 then n.content end, n.actor_id,
                   n.idempotency_key)
          from inputs n where n.agent_id = s.agent_id and n.state = 'received'
          order by n.delivery_mode desc, n.rank, n.id limit 3) as waiting;

-- name: live
-- The claimer itself, which nobody can declare dead meanwhile. Index: workers_pkey.
w as (
  select id from workers where id = $1 and state = 'live' for share
)

-- name: own_claims
-- Every claim that the database says worker $1 holds. Index: agent_sched_worker.
select agent_id, claim_token, epoch, step_number, inputs_gen, next_sequence from agent_sched where worker_id = $1;

-- name: read_claim
-- One agent's hot row with evidence of a save whose outcome is unknown: the state of step $2, and the sequence of event
-- $3 if it is there at or after $4. Index: agent_sched_pkey, steps_pkey, events_pkey.
select s.worker_id, s.claim_token, s.epoch, s.next_sequence, s.inputs_gen, s.turn_id, s.turn_sequence, s.step_number,
       s.batch_sequence, s.ready_at is not null as ready,
       (select st.state from steps st where st.agent_id = s.agent_id and st.number = $2) as step_state,
       (select e.sequence from events e where e.agent_id = s.agent_id and e.sequence >= $4 and e.id = $3) as event_sequence,
       statement_timestamp() as read_at,
       (select st.frontier from steps st where st.agent_id = s.agent_id and st.number = s.step_number) as frontier
from agent_sched s where s.agent_id = $1;

-- name: oldest_waiter
-- Age in seconds of the agent that has been ready longest, if that is at least $1 seconds; else null.
-- The bound keeps the scan to the head of the index. Index: agent_sched_ready.
select extract(epoch from statement_timestamp() - s.ready_at)::float8 as age_s
from agent_sched s
where s.worker_id is null and s.gate = 'open' and s.ready_at <= statement_timestamp() - make_interval(secs => $1)
  and s.ready_at >= $2
order by s.ready_at limit 1;

-- name: queue_depth
-- Ready and unclaimed agents, and the age in seconds of the oldest (metrics, every few seconds). Index: agent_sched_ready.
select count(*)::bigint as depth,
       coalesce(extract(epoch from statement_timestamp() - min(ready_at)), 0)::float8 as oldest_s
from agent_sched where worker_id is null and gate = 'open' and ready_at <= statement_timestamp();

-- name: agents_by_status
-- Agents by derived status (metrics, once a minute). Reads the whole narrow table.
select case when gate = 'paused' and worker_id is not null then 'pausing'
            when gate <> 'open' then gate
            when worker_id is not null or ready_at is not null then 'running'
            when open_calls > 0 then 'waiting'
            else 'idle' end as status, count(*)::bigint as agents
from agent_sched group by 1;
