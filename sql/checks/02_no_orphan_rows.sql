-- Hot tables have no foreign keys; this stands in for them.
select 'events' as table_name, e.agent_id from events e where not exists (select from agents a where a.id = e.agent_id)
union all
select 'steps', s.agent_id from steps s where not exists (select from agents a where a.id = s.agent_id)
union all
select 'tool_calls', t.agent_id from tool_calls t where not exists (select from agents a where a.id = t.agent_id)
union all
select 'turns', t.agent_id from turns t where not exists (select from agents a where a.id = t.agent_id)
union all
select 'agent_sched', s.agent_id from agent_sched s where not exists (select from agents a where a.id = s.agent_id)
union all
select 'agents', a.id from agents a where not exists (select from agent_sched s where s.agent_id = a.id);
