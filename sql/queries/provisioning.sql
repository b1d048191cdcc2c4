-- Pool machines whose place is made, replaced, put to sleep, woken or removed: claims on the machine's row, and their ends.

-- name: claim_due_machines
-- Take up to $3 pool machines that are to be made or removed now, as live worker $1 with claim token $2, for $4 seconds: of
-- the providers $5 whose resources this replica reaches at $6 (parallel). One whose place nobody knows yet is bound to the
-- replica's own here, before anything can have been made. A driver's claim does not keep a machine from being removed.
-- Index: machines_due, workers_pkey, machine_pools_pkey.
with w as materialized (select id from workers where id = $1 and state = 'live' for share),
c as materialized (
  select m.id, h.host from machines m, w, unnest($5::text[], $6::text[]) as h (provider, host)
  where m.lifecycle_state in ('provisioning', 'provision_failed', 'deleting', 'delete_failed') and m.source_kind = 'pool'
    and m.next_reconcile_after <= statement_timestamp()
    and (m.claimed_until is null or m.claimed_until < statement_timestamp())
    and h.provider = m.provider and h.host = coalesce(m.resource_host, h.host)
  order by m.next_reconcile_after, m.id limit $3
  for no key update of m skip locked)
update machines m set worker_id = $1, claim_token = $2, claimed_until = statement_timestamp() + make_interval(secs => $4),
  resource_host = nullif(c.host, ''), generation = greatest(m.generation, 1),
  provision_attempts = m.provision_attempts + (m.lifecycle_state in ('provisioning', 'provision_failed'))::integer,
  delete_attempts = m.delete_attempts + (m.lifecycle_state in ('deleting', 'delete_failed'))::integer
from c, machine_pools p
where m.id = c.id and p.id = m.pool_id
returning m.id, m.org_id, m.provider, m.lifecycle_state, m.lifecycle_version, m.claim_token, m.resource_id, m.resource_host,
  m.generation, m.cwd, m.cpu, m.memory_mb, m.provider_options::text as options, p.provider_config::text as config,
  m.provision_attempts, m.delete_attempts;

-- name: hold_claim
-- Extend a claim for $4 seconds while a slow step goes on. Index: machines_pkey.
update machines set claimed_until = statement_timestamp() + make_interval(secs => $4)
where id = $1 and lifecycle_version = $2 and claim_token = $3 returning id;

-- name: note_resource
-- What a provider made for a machine, whatever comes of the rest. Index: machines_pkey.
update machines set resource_id = $4, sandbox_url = $5, updated_at = statement_timestamp()
where id = $1 and lifecycle_version = $2 and claim_token = $3 and deleted_at is null returning id;

-- name: activate
-- The machine's place is there. Nothing when the machine went another way meanwhile. Index: machines_pkey.
update machines
set lifecycle_state = 'active', lifecycle_version = lifecycle_version + 1, resource_id = $4, sandbox_url = $5,
    metadata = metadata || $6::jsonb, provision_attempts = 0, next_reconcile_after = null, asleep_since = null,
    wake_until = null, wake_attempts = 0, worker_id = null, claim_token = null, claimed_until = null,
    lifecycle_reason_code = case when generation > 1 then 'container_replaced' else '' end,
    lifecycle_reason_message = case when generation <= 1 then ''
                                    when lifecycle_reason_code = 'container_lost' then lifecycle_reason_message
                                    -- Failed attempts have put their own words there.
                                    else 'its container was replaced; what ran in it is lost' end,
    activated_at = statement_timestamp(), last_activity_at = statement_timestamp(), updated_at = statement_timestamp()
where id = $1 and lifecycle_version = $2 and claim_token = $3 and lifecycle_state in ('provisioning', 'provision_failed')
returning id;

-- name: provision_failed
-- An attempt failed; the next may be made after $6 seconds. Index: machines_pkey.
update machines
set lifecycle_state = 'provision_failed', lifecycle_reason_code = $4, lifecycle_reason_message = $5,
    next_reconcile_after = statement_timestamp() + make_interval(secs => $6),
    worker_id = null, claim_token = null, claimed_until = null, updated_at = statement_timestamp()
where id = $1 and lifecycle_version = $2 and claim_token = $3 and lifecycle_state in ('provisioning', 'provision_failed')
returning id;

-- name: put_off
-- The place could not be asked, with reason $5, in words $6: not an attempt, and tried again after $4 seconds. `updated_at`
-- then says since when that has been so, however often it is tried. Index: machines_pkey.
update machines
set next_reconcile_after = statement_timestamp() + make_interval(secs => $4),
    updated_at = case when lifecycle_reason_code = $5 then updated_at else statement_timestamp() end,
    lifecycle_reason_code = $5, lifecycle_reason_message = $6,
    provision_attempts = greatest(0, provision_attempts - 1), worker_id = null, claim_token = null, claimed_until = null
where id = $1 and lifecycle_version = $2 and claim_token = $3
  and lifecycle_state in ('provisioning', 'provision_failed') returning id;

-- name: delete_failed
-- It could not be removed; the next attempt comes after $5 seconds. Index: machines_pkey.
update machines
set lifecycle_state = 'delete_failed', lifecycle_reason_message = $4,
    next_reconcile_after = statement_timestamp() + make_interval(secs => $5),
    worker_id = null, claim_token = null, claimed_until = null, updated_at = statement_timestamp()
where id = $1 and lifecycle_version = $2 and claim_token = $3 and lifecycle_state in ('deleting', 'delete_failed')
returning id;

-- name: removed
-- Nothing is left of the machine, and nothing of a project's right to use it. Index: machines_pkey, machine_grants_of_machine.
with m as (
  update machines
  set lifecycle_state = 'deleted', lifecycle_version = lifecycle_version + 1, deleted_at = statement_timestamp(),
      current_runtime_id = null, asleep_since = null, next_reconcile_after = null,
      worker_id = null, claim_token = null, claimed_until = null, updated_at = statement_timestamp()
  where id = $1 and lifecycle_version = $2 and claim_token = $3 and lifecycle_state in ('deleting', 'delete_failed')
  returning id),
g as (
  update machine_grants g set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
  from m where g.machine_id = m.id and g.deleted_at is null)
select id from m;

-- name: release
-- Give a claim back on a machine that went another way meanwhile; nothing when it is somebody else's. Index: machines_pkey.
update machines set worker_id = null, claim_token = null, claimed_until = null
where id = $1 and claim_token = $2 and lifecycle_state <> 'active' returning id;

-- name: reason_message
-- Why a locked machine is where it is, in words. Index: machines_pkey.
update machines set lifecycle_reason_message = $2 where id = $1;

-- name: lifecycle
-- A machine's life, locked. Index: machines_pkey.
select lifecycle_state, lifecycle_version, generation, provision_attempts from machines where id = $1 for no key update;

-- name: replace
-- An active machine at generation $2 lost its place, as was found under the claim $4 (0: by nobody's): the next generation is
-- made under the same row. The old resource stays named until then. Index: machines_pkey.
update machines
set lifecycle_state = 'provisioning', lifecycle_version = lifecycle_version + 1, generation = generation + 1,
    lifecycle_reason_code = 'container_lost', lifecycle_reason_message = $3, provision_attempts = 0,
    next_reconcile_after = statement_timestamp(), asleep_since = null, wake_until = null,
    worker_id = null, claim_token = null, claimed_until = null, updated_at = statement_timestamp()
where id = $1 and generation = $2 and coalesce(claim_token, 0) = $4 and lifecycle_state = 'active'
  and source_kind = 'pool' returning id;

-- name: driven_here
-- Active machines of one place that worker $1 drives. Index: machines_driven.
select id, resource_id, generation, claim_token from machines
where worker_id = $1 and lifecycle_state = 'active' and provider = $2 and coalesce(resource_host, '') = $3
  and asleep_since is null;

-- name: silent_daemons
-- Active machines of the places $1 and $2 (parallel) with an id after $3, or the machine $4, whose own daemon is out of
-- reach, though its place was made more than $5 seconds ago: what the provider has to know, whether any daemon came since
-- then, and for how long the place has been there. Index: machines_to_drive, machines_pkey, machine_runtimes_pkey.
select m.id, m.org_id, m.provider, m.lifecycle_state, m.lifecycle_version, 0::bigint as claim_token, m.resource_id,
  m.resource_host, m.generation, m.cwd, m.cpu, m.memory_mb, m.provider_options::text as options,
  p.provider_config::text as config, m.provision_attempts, m.delete_attempts,
  r.id is null or r.created_at < m.activated_at as never,
  extract(epoch from statement_timestamp() - m.activated_at)::float8 as made_s
from machines m join machine_pools p on p.id = m.pool_id left join machine_runtimes r on r.id = m.current_runtime_id
where m.source_kind = 'pool' and m.lifecycle_state = 'active' and m.worker_id is null and m.asleep_since is null
  and ($4::uuid is null or m.id = $4) and m.id > $3
  and ($4 is not null or exists (select from unnest($1::text[], $2::text[]) as h (provider, host)
                                  where h.provider = m.provider and h.host = coalesce(m.resource_host, '')))
  and m.activated_at < statement_timestamp() - make_interval(secs => $5)
  and (r.id is null or r.state = 'ended' or r.session_id is null or r.lease_expires_at < statement_timestamp())
order by m.id limit 40;

-- name: live_machines
-- Which of these machines are not deleted. Index: machines_pkey.
select id from machines where id = any($1::uuid[]) and deleted_at is null;

-- name: idle_machines
-- Active pool machines on which nothing is going on or waiting, and nothing was for their time. Index: machines_pool,
-- processes_live, process_actions_open.
select m.id, m.org_id from machines m
where m.source_kind = 'pool' and m.lifecycle_state = 'active' and m.delete_after_idle_minutes > 0
  and ($2::uuid is null or m.id = $2)
  and greatest(m.last_activity_at, m.activated_at)
      < statement_timestamp() - make_interval(secs => m.delete_after_idle_minutes * $1::float8)
  and (m.wake_until is null or m.wake_until < statement_timestamp())
  and not exists (select from processes p where p.machine_id = m.id and p.state in ('queued', 'starting', 'running'))
  and not exists (select from process_actions a where a.machine_id = m.id and a.state in ('queued', 'accepted'))
order by m.id limit 40;

-- name: sleepy_machines
-- Active pool machines that may be put to sleep: their options say after how long, and nothing is going on or waiting.
-- Index: machines_pool, processes_live, process_actions_open.
select m.id from machines m
where m.source_kind = 'pool' and m.lifecycle_state = 'active' and m.asleep_since is null and m.sandbox_url is not null
  and m.provider = any($1::text[]) and ($2::uuid is null or m.id = $2)
  and (m.provider_options ->> 'sleep_after_ms') ~ '^[1-9][0-9]{0,12}$'
  and greatest(m.last_activity_at, m.activated_at)
      < statement_timestamp() - make_interval(secs => (m.provider_options ->> 'sleep_after_ms')::float8 / 1000)
  and not exists (select from processes p where p.machine_id = m.id and p.state in ('queued', 'starting', 'running'))
  and not exists (select from process_actions a where a.machine_id = m.id and a.state in ('queued', 'accepted'))
order by m.id limit 40;

-- name: fall_asleep
-- A locked machine sleeps from now on; its driver lets go of it. Index: machines_pkey.
update machines set asleep_since = statement_timestamp(), wake_until = null, wake_attempts = 0,
  worker_id = null, claim_token = null, claimed_until = null, updated_at = statement_timestamp()
where id = $1 and lifecycle_state = 'active' returning id;

-- name: is_awake
-- Whether a machine that was to sleep was woken meanwhile. Index: machines_pkey.
select exists (select from machines
                where id = $1 and lifecycle_version = $2 and lifecycle_state = 'active' and asleep_since is null);

-- name: claim_wakes
-- Sleeping machines of these places ($1, $2 parallel) that have something to do and that nobody is waking: ours to wake for
-- $3 seconds. After attempts that came to nothing the next one waits $4 for each, for five at most: what is to be done gives
-- up in its own time.
-- Index: processes_queued, process_actions_open, machines_pkey.
with c as materialized (
  select m.id from machines m
  where m.id = any(array(
      select machine_id from processes where state = 'queued'
      union select machine_id from process_actions where state in ('queued', 'accepted') and state = 'queued'))
    and m.asleep_since is not null and m.lifecycle_state = 'active' and m.source_kind = 'pool'
    and (m.wake_until is null
         or m.wake_until < statement_timestamp() - make_interval(secs => least(m.wake_attempts, 5) * $4::float8))
    and exists (select from unnest($1::text[], $2::text[]) as h (provider, host)
                where h.provider = m.provider and h.host = coalesce(m.resource_host, ''))
  order by m.id limit 40 for no key update of m skip locked)
update machines m set wake_until = statement_timestamp() + make_interval(secs => $3), wake_attempts = wake_attempts + 1
from c, machine_pools p where m.id = c.id and p.id = m.pool_id
returning m.id, m.org_id, m.provider, m.lifecycle_state, m.lifecycle_version, 0::bigint as claim_token, m.resource_id,
  m.resource_host, m.generation, m.cwd, m.cpu, m.memory_mb, m.provider_options::text as options,
  p.provider_config::text as config, m.provision_attempts, m.delete_attempts;

-- name: woken
-- A machine is awake, and free to be driven. Index: machines_pkey.
update machines set asleep_since = null, wake_until = null, wake_attempts = 0, updated_at = statement_timestamp()
where id = $1 and lifecycle_version = $2 and asleep_since is not null returning id;

-- name: wake_failed
-- A wake came to nothing: from now on it keeps what waits no longer from giving up. Index: machines_pkey.
update machines set wake_until = statement_timestamp() where id = $1 and lifecycle_version = $2 and asleep_since is not null;

-- name: machine_at
-- All that its provider has to know of a machine. Index: machines_pkey, machine_pools_pkey.
select m.id, m.org_id, m.provider, m.lifecycle_state, m.lifecycle_version, coalesce(m.claim_token, 0) as claim_token,
  m.resource_id, m.resource_host, m.generation, m.cwd, m.cpu, m.memory_mb, m.provider_options::text as options,
  p.provider_config::text as config, m.provision_attempts, m.delete_attempts
from machines m join machine_pools p on p.id = m.pool_id where m.id = $1;

-- name: provider_secret
-- The sealed secret by which the pool of machine $1 is known to its provider; without a version when its value is gone, and
-- no row when the pool names none. One of a deleted organization serves until the machine is gone. Index: machines_pkey,
-- machine_pools_pkey, secrets_pkey, secret_versions_pkey.
select s.id, s.name, v.version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext
from machines m join machine_pools p on p.id = m.pool_id
join secrets s on s.id = p.provider_auth_secret_id
left join secret_versions v on v.secret_id = s.id and v.version = s.current_version
where m.id = $1;
