-- A claim of a worker that is not live is released within a sweep; older than 30 s it is stuck.
select s.agent_id, s.worker_id, w.state, w.ended_at
from agent_sched s left join workers w on w.id = s.worker_id
where s.worker_id is not null
  and (w.id is null or (w.state <> 'live' and w.ended_at < clock_timestamp() - interval '30 seconds'));
