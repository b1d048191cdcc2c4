-- Every agent's log is 1, 2, 3, … up to the counter of its hot row (invariant 1).
select s.agent_id, s.next_sequence, count(e.sequence) as events, min(e.sequence) as first, max(e.sequence) as last
from agent_sched s left join events e on e.agent_id = s.agent_id
group by s.agent_id, s.next_sequence
having count(e.sequence) <> s.next_sequence - 1 or coalesce(max(e.sequence), 0) <> s.next_sequence - 1
    or coalesce(min(e.sequence), 1) <> 1;
