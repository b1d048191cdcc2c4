-- A machine that is deleted is granted to no project and attached to no agent.
select g.id, 'grant' as what
from machine_grants g join machines m on m.id = g.machine_id
where g.deleted_at is null and m.lifecycle_state = 'deleted'
union all
select b.id, 'binding'
from agent_machine_bindings b join machines m on m.id = b.machine_id
where b.state = 'attached' and m.lifecycle_state = 'deleted';
