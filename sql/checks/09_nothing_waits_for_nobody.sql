-- An open, unclaimed agent with work of the engine's own is ready: no wake-up is ever lost for good.
select s.agent_id, s.turn_open, s.open_calls, s.ready_at, s.retry_at
from agent_sched s
where s.gate = 'open' and s.worker_id is null and s.ready_at is null
  and ((s.turn_open and s.open_calls = 0)
       or (s.open_calls = 0 and exists (select from inputs n where n.agent_id = s.agent_id and n.state = 'received'))
       or exists (select from tool_calls t where t.agent_id = s.agent_id and t.output_sequence = s.batch_sequence
                   and t.state = 'ready' and t.type <> 'custom'));
