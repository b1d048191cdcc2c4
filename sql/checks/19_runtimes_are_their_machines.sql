-- An active runtime is its machine's current one, of a machine that is not deleted, and only an active one has a channel.
select r.id, r.machine_id, r.state
from machine_runtimes r join machines m on m.id = r.machine_id
where r.state = 'active' and (m.current_runtime_id is distinct from r.id or m.lifecycle_state = 'deleted')
   or r.state = 'ended' and r.session_id is not null
   or r.session_id is not null and r.disconnected_at is not null;
