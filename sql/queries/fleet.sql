-- Which replica serves which machine: channels to look at, and the claims of those that drive pool machines.

-- name: channels_with_work
-- Of the open channels of one process (runtime $1, session $2 and machine $3, in parallel), those with something to do:
-- work is queued, something is to be terminated, or the channel is not the one that counts any more. One statement for
-- all of them makes up for lost hints. Index: machine_runtimes_pkey, processes_live, process_actions_open.
select c.session_id
from unnest($1::uuid[], $2::uuid[], $3::uuid[]) as c (runtime_id, session_id, machine_id)
left join machine_runtimes r on r.id = c.runtime_id
where r.session_id is distinct from c.session_id or r.state <> 'active'
  or exists (select from processes p where p.machine_id = c.machine_id and p.state in ('queued', 'starting', 'running')
             and (p.state = 'queued' or p.terminate_requested is not null))
  or exists (select from process_actions a where a.machine_id = c.machine_id and a.state in ('queued', 'accepted')
             and a.state = 'queued');

-- name: claim_machines
-- Take up to $3 active pool machines that nobody drives, as live worker $1, with claim token $2: of the providers $4 whose
-- resources this replica reaches at $5 (parallel; an empty host stands for those that name none), but for those of $6.
-- Sleeping ones are left alone. Index: machines_to_drive, workers_pkey.
with w as materialized (select id from workers where id = $1 and state = 'live' for share),
c as materialized (
  select m.id from machines m, w
  where m.lifecycle_state = 'active' and m.source_kind = 'pool' and m.worker_id is null
    and m.asleep_since is null and m.resource_id is not null and m.id <> all($6::uuid[])
    and exists (select from unnest($4::text[], $5::text[]) as p (provider, host)
                where p.provider = m.provider and p.host = coalesce(m.resource_host, ''))
  order by m.id limit $3
  for no key update of m skip locked)
update machines m set worker_id = $1, claim_token = $2
from c where m.id = c.id
returning m.id, m.generation;

-- name: lost_machines
-- Of the machines $2 that worker $1 drives with tokens $3 at generations $4 (parallel), those that it must let go of: the
-- claim is somebody else's, the container was replaced, or the machine is to be put to sleep or removed.
-- Index: machines_pkey.
select h.machine_id
from unnest($2::uuid[], $3::bigint[], $4::integer[]) as h (machine_id, claim_token, generation)
left join machines m on m.id = h.machine_id
where m.worker_id is distinct from $1 or m.claim_token is distinct from h.claim_token
  or m.generation <> h.generation or m.lifecycle_state <> 'active' or m.asleep_since is not null;

-- name: stray_machines
-- Claims of worker $1 on active machines that it does not drive ($2): the answer to the claim was lost. Index: machines_driven.
select m.id, m.claim_token, m.generation
from machines m
where m.worker_id = $1 and m.lifecycle_state = 'active' and m.source_kind = 'pool' and m.id <> all($2::uuid[]);

-- name: release_machines
-- Give claims of worker $1 back: machines $2 with tokens $3 (parallel), as far as they still are these.
-- Index: machines_pkey.
update machines m set worker_id = null, claim_token = null, claimed_until = null
from unnest($2::uuid[], $3::bigint[]) as c (machine_id, claim_token)
where m.id = c.machine_id and m.worker_id = $1 and m.claim_token = c.claim_token
returning m.id;

-- name: release_machines_of_the_dead
-- Take the claims of workers that are not live, whatever they were for; a standing sweep, $1 machines at a time, that skips
-- locked ones. Index: machines_driven, workers_pkey.
with c as materialized (
  select m.id from machines m
  where m.worker_id = any(array(
    select distinct h.worker_id from machines h
    where h.worker_id is not null
      and not exists (select from workers l where l.id = h.worker_id and l.state = 'live')))
  order by m.id limit $1
  for no key update of m skip locked)
update machines m set worker_id = null, claim_token = null, claimed_until = null
from c where m.id = c.id
returning m.id;

-- name: disconnect_channels_of_the_dead
-- The channels of workers that are not live any more are gone with them: up to $1 machines are offline from now on, unless
-- they connected again meanwhile. A standing sweep, that skips locked rows. A process that only has the API is no worker:
-- leases tell that it is gone. Index: machine_runtimes_active, workers_pkey.
update machine_runtimes set disconnected_at = clock_timestamp(), session_id = null, worker_id = null
where id = any(array(
  select r.id from machine_runtimes r
  where r.state = 'active' and r.session_id is not null
    and exists (select from workers w where w.id = r.worker_id and w.state <> 'live')
  order by r.id limit $1
  for no key update of r skip locked))
returning machine_id;

-- name: extend_driven
-- Extend the leases of driven machines to $3 seconds from now, all of one process at once: what tells that their driver
-- is gone is its worker's death, so their leases are long. Index: machine_runtimes_pkey.
update machine_runtimes r
set lease_expires_at = clock_timestamp() + make_interval(secs => $3), last_seen_at = clock_timestamp()
from unnest($1::uuid[], $2::uuid[]) as c (runtime_id, session_id)
where r.id = c.runtime_id and r.session_id = c.session_id and r.state = 'active'
returning r.session_id;

-- name: offer_installation_value
-- Write a fact of this database that must not change once it is there. Index: installation_pkey.
insert into installation (name, value) values ($1, $2) on conflict (name) do nothing;
