-- A call is running only while the step that started it is (invariant 4: nobody else may run it again).
select t.agent_id, t.id, t.step_number, s.state
from tool_calls t left join steps s on s.agent_id = t.agent_id and s.number = t.step_number
where t.state = 'running' and s.state is distinct from 'started';
