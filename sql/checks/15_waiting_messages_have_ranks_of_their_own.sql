-- Messages that wait in one lane have different ranks, below the next one to be given out: their order is certain.
select n.agent_id, n.delivery_mode, n.rank, count(*) as messages, s.next_rank
from inputs n join agent_sched s on s.agent_id = n.agent_id
where n.state = 'received'
group by n.agent_id, n.delivery_mode, n.rank, s.next_rank
having count(*) > 1 or n.rank >= s.next_rank;
