-- Turn numbers are 1, 2, 3, … and every event carries the turn whose range it stands in.
select t.agent_id, t.turn_sequence, 'gap in turns' as fault
from (select agent_id, turn_sequence, row_number() over (partition by agent_id order by turn_sequence) as expected
        from turns) t
where t.turn_sequence <> t.expected
union all
select e.agent_id, e.sequence, 'event in another turn'
from events e
join lateral (select t.id, t.turn_sequence from turns t
               where t.agent_id = e.agent_id and t.first_sequence <= e.sequence
               order by t.turn_sequence desc limit 1) t on true
where t.id <> e.turn_id or t.turn_sequence <> e.turn_sequence;
