-- A call of a machine tool waits only while its command is not over and not yet told of, or its action is open: somebody
-- will complete it.
select t.agent_id, t.id, t.name
from tool_calls t
where t.state = 'waiting' and t.type = 'built_in' and t.name in ('run_command', 'read_process', 'write_process', 'stop_process')
  and not exists (select from processes p
                   where p.agent_id = t.agent_id and p.tool_call_id = t.id and p.state in ('queued', 'starting'))
  and not exists (select from process_actions a
                   where a.agent_id = t.agent_id and a.tool_call_id = t.id and a.state in ('queued', 'accepted'));
