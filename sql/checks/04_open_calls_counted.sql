-- The hot row counts the open calls of its batch, and no call outside of the batch is open.
select s.agent_id, s.open_calls, s.batch_sequence, count(t.id) as open,
       count(t.id) filter (where t.output_sequence is distinct from s.batch_sequence) as elsewhere
from agent_sched s
left join tool_calls t on t.agent_id = s.agent_id and t.state <> 'completed'
where s.gate <> 'crashed' and s.void = '{}'
group by s.agent_id, s.open_calls, s.batch_sequence
having count(t.id) <> s.open_calls or (s.open_calls = 0) <> (s.batch_sequence is null)
    or count(t.id) filter (where t.output_sequence is distinct from s.batch_sequence) > 0;
