-- At most one step per agent is started, it is the latest, and somebody holds the claim under which it began.
select s.agent_id, s.number, s.epoch, h.worker_id, h.epoch as held_epoch, h.step_number
from steps s join agent_sched h on h.agent_id = s.agent_id
where s.state = 'started'
  and (h.worker_id is distinct from s.worker_id or h.epoch <> s.epoch or h.step_number <> s.number);
