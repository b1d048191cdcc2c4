-- Turn numbers are 1, 2, 3, … and every event carries the turn whose range it stands in.
-- Turns and events meet in one sort, not row by row: an agent may have 10,000 of both.
select t.agent_id, t.turn_sequence, 'gap in turns' as fault
from (select agent_id, turn_sequence, row_number() over (partition by agent_id order by turn_sequence) as expected
        from turns) t
where t.turn_sequence <> t.expected
union all
select e.agent_id, e.sequence, 'event in another turn'
from (
  select agent_id, sequence, turn_sequence, turn_id, starts,
         max(turn_sequence) filter (where starts) over (partition by agent_id order by sequence, starts desc) as expected
  from (
    select agent_id, first_sequence as sequence, turn_sequence, id as turn_id, true as starts from turns
    union all
    select agent_id, sequence, turn_sequence, turn_id, false from events
  ) marks
) e
left join turns t on t.agent_id = e.agent_id and t.turn_sequence = e.expected and t.id = e.turn_id
where not e.starts and e.expected is not null and (e.turn_sequence <> e.expected or t.id is null);
