-- Every completed call has exactly one result event, at the sequence that it names; no open call has one (invariant 5).
select t.agent_id, t.id, t.state, t.result_sequence, e.kind
from tool_calls t
left join events e on e.agent_id = t.agent_id and e.sequence = t.result_sequence
where (t.state = 'completed' and (e.kind is distinct from 'tool_result'))
   or (t.state <> 'completed' and t.result_sequence is not null)
union all
select e.agent_id, null, 'results without their own call', e.sequence, e.kind
from events e
where e.kind = 'tool_result'
  and (select count(*) from tool_calls t where t.agent_id = e.agent_id and t.result_sequence = e.sequence) <> 1;
