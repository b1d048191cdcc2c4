-- name: daemon_token
-- Whom a daemon's token stands for; nobody for a revoked one and for a machine that takes no daemon.
-- Index: unique key of machine_daemon_tokens, machines_pkey.
select t.id, t.machine_id, m.org_id,
       t.last_used_at is null or t.last_used_at < statement_timestamp() - interval '1 hour' as stale
from machine_daemon_tokens t join machines m on m.id = t.machine_id
where t.token_hash = $1 and t.revoked_at is null and m.deleted_at is null
  and (m.lifecycle_state = 'active'
       or m.source_kind = 'pool' and m.lifecycle_state in ('provisioning', 'provision_failed'));

-- name: touch_daemon_token
-- Note that a daemon's token was used. Index: machine_daemon_tokens_pkey.
update machine_daemon_tokens set last_used_at = statement_timestamp() where id = $1;

-- name: token_is_good
-- Whether a token of a locked machine is not revoked. Index: machine_daemon_tokens_pkey.
select exists (select from machine_daemon_tokens where id = $1 and machine_id = $2 and revoked_at is null);

-- name: revoke_other_tokens
-- Revoke all tokens of a locked machine but one (null: all). Index: machine_daemon_tokens_machine.
update machine_daemon_tokens set revoked_at = statement_timestamp(), revoke_reason = $3
where machine_id = $1 and revoked_at is null and id is distinct from $2;

-- name: lock_machine
-- Lock one machine: the first statement of each transaction that changes its runtime or its life. Index: machines_pkey.
select id, org_id, source_kind, lifecycle_state, current_runtime_id, sandbox_url, claim_token, generation
from machines where id = $1 and deleted_at is null for no key update;

-- name: runtime_of_instance
-- The runtime of one daemon process. The machine is locked. Index: unique key of machine_runtimes.
select id, state, state_reason_code, daemon_version from machine_runtimes where machine_id = $1 and daemon_instance_id = $2;

-- name: runtime_at
-- One runtime of a machine, with whether it is the current one. Index: machine_runtimes_pkey.
select r.id, r.org_id, r.machine_id, r.daemon_instance_id, r.daemon_version, r.capacity, r.state, r.state_reason_code,
       r.state_reason_message, r.created_at, r.last_seen_at, r.lease_expires_at, r.ended_at, r.session_id, r.worker_id,
       m.current_runtime_id = r.id as current
from machine_runtimes r join machines m on m.id = r.machine_id where r.id = $1;

-- name: end_runtimes
-- End the active runtime of a locked machine, unless it is $2. Whatever a channel of it still tries is refused from here
-- on. Index: machine_runtimes_active.
update machine_runtimes set state = 'ended', ended_at = statement_timestamp(), state_reason_code = $3,
  disconnected_at = coalesce(disconnected_at, statement_timestamp()), session_id = null, worker_id = null
where machine_id = $1 and state = 'active' and id is distinct from $2
returning id, token_id;

-- name: insert_runtime
-- The runtime of a new daemon process. Index: none.
insert into machine_runtimes (id, org_id, machine_id, token_id, daemon_instance_id, daemon_version, capacity, lease_expires_at)
values ($1, $2, $3, $4, $5, $6, $7, statement_timestamp() + make_interval(secs => $8));

-- name: revive_runtime
-- A daemon process registers again: the same runtime, without a channel. The machine is locked. Index: machine_runtimes_pkey.
update machine_runtimes set state = 'active', ended_at = null, state_reason_code = '', state_reason_message = '',
  token_id = $2, capacity = $3, session_id = null, worker_id = null, connected_at = null, disconnected_at = null,
  last_seen_at = statement_timestamp(), lease_expires_at = statement_timestamp() + make_interval(secs => $4)
where id = $1;

-- name: machine_registered
-- A locked machine has a daemon: what was noted about its sleep and its troubles is over. Index: machines_pkey.
update machines set current_runtime_id = $2, observed_platform = coalesce($3, observed_platform),
  asleep_since = null, wake_until = null, wake_attempts = 0, failure_report = null,
  last_observed_at = statement_timestamp(), updated_at = statement_timestamp()
where id = $1;

-- name: open_channel
-- Make one connection the channel of a machine's current runtime; a channel before it changes nothing more.
-- Index: machine_runtimes_pkey.
update machine_runtimes r set session_id = $3, worker_id = $4, connected_at = statement_timestamp(), disconnected_at = null,
  last_seen_at = statement_timestamp()
from machines m
where r.id = $2 and r.machine_id = $1 and r.state = 'active' and m.id = r.machine_id and m.current_runtime_id = r.id
returning r.id, r.org_id, r.machine_id, r.daemon_instance_id, r.daemon_version, r.capacity, r.state, r.state_reason_code,
  r.state_reason_message, r.created_at, r.last_seen_at, r.lease_expires_at, r.ended_at, r.session_id, r.worker_id;

-- name: close_channel
-- The channel is gone; not the runtime. Index: machine_runtimes_pkey.
update machine_runtimes set session_id = null, worker_id = null, disconnected_at = statement_timestamp()
where id = $1 and session_id = $2 and state = 'active' returning id;

-- name: beat
-- Renew a runtime's lease from its channel, also one that ran out. Tells whether the machine's platform is a new one.
-- Index: machine_runtimes_pkey.
update machine_runtimes r set last_seen_at = statement_timestamp(),
  lease_expires_at = statement_timestamp() + make_interval(secs => $4)
from machines m
where r.id = $1 and r.session_id = $2 and r.daemon_instance_id = $3 and r.state = 'active' and m.id = r.machine_id
returning r.machine_id, $5::text is not null and m.observed_platform is distinct from $5 as moved;

-- name: set_platform
-- What a daemon says that its machine is. Index: machines_pkey.
update machines set observed_platform = $2 where id = $1;

-- name: fall_asleep
-- A locked machine sleeps. Index: machines_pkey.
update machines set asleep_since = statement_timestamp(), wake_until = null, wake_attempts = 0,
  updated_at = statement_timestamp()
where id = $1;

-- name: has_pending_work
-- Whether a machine has anything to do, or to report. Index: processes_live, process_actions_open.
select exists (select from processes where machine_id = $1 and state in ('queued', 'starting', 'running'))
    or exists (select from process_actions where machine_id = $1 and state in ('queued', 'accepted'));

-- name: keep_failure
-- The last trouble that a daemon told of, and when. Index: machines_pkey.
update machines set failure_report = $2::jsonb || jsonb_build_object('reported_at', statement_timestamp()), updated_at = statement_timestamp() where id = $1;

-- name: touch_activity
-- Something began or ended on a machine; at most one write in 30 s after the first, and none while somebody has it locked.
-- Index: machines_pkey.
update machines set last_activity_at = statement_timestamp()
where id = any(array(
  select id from machines
  where id = $1 and (last_activity_at < statement_timestamp() - interval '30 seconds' or last_activity_at = activated_at)
  for no key update skip locked));

-- name: end_lapsed_runtimes
-- End runtimes whose lease ran out more than $1 seconds ago; a daemon that is back sooner renews it. Index: machine_runtimes_lease.
update machine_runtimes set state = 'ended', ended_at = statement_timestamp(), state_reason_code = 'daemon_lease_expired',
  disconnected_at = coalesce(disconnected_at, lease_expires_at), session_id = null, worker_id = null
where id = any(array(
  select id from machine_runtimes
  where state = 'active' and lease_expires_at < statement_timestamp() - make_interval(secs => $1)
  order by lease_expires_at limit $2 for no key update skip locked))
  and state = 'active' and lease_expires_at < statement_timestamp() - make_interval(secs => $1)
returning id, machine_id;

-- name: active_token
-- The token of a locked machine's active runtime. Index: machine_runtimes_active.
select token_id from machine_runtimes where machine_id = $1 and state = 'active';
