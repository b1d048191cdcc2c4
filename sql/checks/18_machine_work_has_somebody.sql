-- Work on machines that nobody would ever do or end: queued for an archived agent, open on a deleted machine, waiting behind
-- a command that is over (reads of what ran may), or granted to nobody. And no two actions of a command at once.
select p.id, 'queued for an archived agent' as fault
from processes p join agents a on a.id = p.agent_id where p.state = 'queued' and a.archived_at is not null
union all
select p.id, 'open on a deleted machine'
from processes p join machines m on m.id = p.machine_id
where p.state in ('queued', 'starting', 'running') and m.lifecycle_state = 'deleted'
union all
select c.id, 'open on a deleted machine'
from process_actions c join machines m on m.id = c.machine_id
where c.state in ('queued', 'accepted') and m.lifecycle_state = 'deleted'
union all
select c.id, 'waits behind a command that is over'
from process_actions c join processes p on p.id = c.process_id
where c.state = 'queued' and p.state in ('exited', 'failed', 'killed', 'unknown') and (c.kind <> 'read' or p.granted_at is null)
union all
select p.id, 'granted to nobody' from processes p
where p.state in ('starting', 'running') and (p.granted_at is null or p.runtime_id is null)
union all
select min(c.id::text)::uuid, 'two actions at once' from process_actions c
where c.state = 'accepted' group by c.process_id having count(*) > 1;
