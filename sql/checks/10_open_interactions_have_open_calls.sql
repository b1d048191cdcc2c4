-- A form is open only while its call waits for it.
select i.agent_id, i.id, i.kind, t.state
from interactions i left join tool_calls t on t.agent_id = i.agent_id and t.id = i.tool_call_id
where i.state = 'open'
  and t.state is distinct from case i.kind when 'permission' then 'awaiting_permission' else 'waiting' end;
