-- Every completed call has exactly one result event, at the sequence that it names; no open call has one (invariant 5).
-- Results and calls meet in one sort, not row by row: an agent may have 10,000 of both.
select agent_id, id::text as id, 'an open call with a result' as fault, result_sequence as sequence
from tool_calls
where (state = 'completed') <> (result_sequence is not null)
union all
select agent_id, min(call_id::text), 'a result without its own call, or a call without its own result', sequence
from (
  select agent_id, sequence, 1 as results, 0 as calls, null::uuid as call_id from events where kind = 'tool_result'
  union all
  select agent_id, result_sequence, 0, 1, id from tool_calls where result_sequence is not null
) both_sides
group by agent_id, sequence
having sum(results) <> 1 or sum(calls) <> 1;
