-- A resolved input names the event by which it entered the log; no two inputs share one.
select n.agent_id, n.id, n.event_sequence, e.kind
from inputs n left join events e on e.agent_id = n.agent_id and e.sequence = n.event_sequence
where n.state = 'resolved' and e.kind is distinct from 'agent_input'
union all
select agent_id, null, event_sequence, 'shared'
from inputs where event_sequence is not null
group by agent_id, event_sequence having count(*) > 1;
