-- name: add_machine
-- A machine that somebody will connect; no row when the idempotency key is used (waits for the other transaction first).
-- Index: machines_key.
insert into machines (id, org_id, source_kind, display_name, description, cwd, env, secret_env, metadata,
                      idempotency_key, activated_at)
values ($1, $2, 'byo', $3, $4, $5, $6::jsonb, $7::jsonb, $8::jsonb, $9, statement_timestamp())
on conflict (org_id, idempotency_key) where idempotency_key is not null do nothing returning id;

-- name: machine_by_key
-- What an idempotency key made, deleted or not. Index: machines_key.
select id from machines where org_id = $1 and idempotency_key = $2;

-- name: count_machines
-- How many machines an organization connected itself. Index: machines_newest.
select count(*)::integer from machines where org_id = $1 and deleted_at is null and source_kind = 'byo';

-- name: lock_machine
-- Lock a machine first of all, as every transaction does that ends what runs on it. Index: machines_pkey.
select id from machines where org_id = $1 and id = $2 and deleted_at is null for no key update;

-- name: find_machine
-- A machine as it is shown, also a deleted one. Index: machines_pkey, machine_runtimes_pkey, machine_daemon_tokens_pkey.
select m.id, m.org_id, m.source_kind, m.display_name, m.description, m.provider, m.lifecycle_state,
       c.state as connection_state, c.reason as connection_reason, m.last_observed_at, m.deleted_at, m.created_at,
       m.updated_at, m.pool_id, m.cwd, m.env::text as env, m.secret_env::text as secret_env, m.metadata::text as metadata,
       m.observed_platform, m.lifecycle_reason_code, m.lifecycle_reason_message,
       m.failure_report::text as failure_report, m.next_reconcile_after, m.provision_attempts, m.delete_attempts
from machines m join machine_connections c on c.machine_id = m.id
where m.org_id = $1 and m.id = $2;

-- name: machine_access
-- Why a caller with roles in these projects ($2) sees a machine. Index: machine_grants_of_machine.
select g.project_id, g.id, g.source_kind from machine_grants g
where g.machine_id = $1 and g.deleted_at is null and g.project_id = any($2::uuid[])
order by g.created_at, g.id;

-- name: list_machines
-- Machines that an organization's manager ($8) sees, or somebody with roles in the projects $9, with the grants for
-- those. With $11 only machines that one of these projects may use. Index: machines_newest, machine_grants_of_machine.
select l.*, c.state as connection_state, c.reason as connection_reason from (
  select case $1::text when 'name' then m.display_name
              else to_char(case $1::text when 'updated_at' then m.updated_at else m.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         m.id, m.org_id, m.source_kind, m.display_name, m.description, m.provider, m.lifecycle_state,
         m.last_observed_at, m.deleted_at, m.created_at, m.updated_at, g.grants
  from machines m
  left join lateral (
    select json_agg(json_build_array(g.project_id, g.id, g.source_kind) order by g.created_at, g.id)::text as grants
    from machine_grants g
    where g.machine_id = m.id and g.deleted_at is null and g.project_id = any($9::uuid[])) g on true
  where m.org_id = $7 and m.deleted_at is null and ($10::text is null or m.source_kind = $10)
    and (g.grants is not null or ($8::boolean and not $11::boolean))
    and ($3::text is null or m.display_name ilike $3)) l
join machine_connections c on c.machine_id = l.id
where ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: change_machine
-- Other defaults for commands on a locked machine; what is null stays. Index: machines_pkey.
update machines set cwd = coalesce($2, cwd), env = coalesce($3::jsonb, env), secret_env = coalesce($4::jsonb, secret_env),
                    updated_at = statement_timestamp()
where id = $1;

-- name: share_env_secrets
-- Keep those of some generic secrets ($2) from being deleted that an organization owns, or, with $3, that a project may
-- use. Index: secrets_pkey, unique key of secret_grants.
select s.id from secrets s
where s.id = any($2::uuid[]) and s.org_id = $1 and s.kind = 'generic' and s.deleted_at is null
  and case when $3::uuid is null then s.owner_kind = 'org'
           else s.owner_project_id = $3
                or exists (select from secret_grants g where g.secret_id = s.id and g.project_id = $3) end
order by s.id for share of s;

-- name: drop_machine_grants
-- Take a locked machine from every project. Index: machine_grants_of_machine.
update machine_grants set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
where machine_id = $1 and deleted_at is null;

-- name: mark_machine_deleted
-- Hide a locked machine for good. Index: machines_pkey.
update machines
set lifecycle_state = 'deleted', lifecycle_version = lifecycle_version + 1, lifecycle_reason_code = $2,
    lifecycle_reason_message = '', deleted_at = statement_timestamp(), updated_at = statement_timestamp(),
    current_runtime_id = null, asleep_since = null, next_reconcile_after = null,
    worker_id = null, claim_token = null, claimed_until = null
where id = $1;

-- name: mark_machine_deleting
-- Let the provisioner remove a locked machine of a pool; nothing when that is under way. Index: machines_pkey.
update machines
set lifecycle_state = 'deleting', lifecycle_version = lifecycle_version + 1, lifecycle_reason_code = $2,
    lifecycle_reason_message = '', delete_attempts = 0, next_reconcile_after = statement_timestamp(),
    updated_at = statement_timestamp()
where id = $1 and lifecycle_state not in ('deleting', 'delete_failed', 'deleted') returning id;

-- name: add_token
-- A token of a locked machine. Index: machine_daemon_tokens_pkey.
insert into machine_daemon_tokens (id, org_id, machine_id, name, metadata, token_hash)
values ($1, $2, $3, $4, $5::jsonb, $6);

-- name: count_tokens
-- How many tokens of a locked machine work. Index: machine_daemon_tokens_machine.
select count(*)::integer from machine_daemon_tokens where machine_id = $1 and revoked_at is null;

-- name: trim_tokens
-- Make all but the newest $2 working tokens of a locked machine worthless. Index: machine_daemon_tokens_machine.
update machine_daemon_tokens set revoked_at = statement_timestamp(), revoke_reason = $3
where id = any(array(
  select id from machine_daemon_tokens where machine_id = $1 and revoked_at is null
  order by created_at desc, id desc offset $2));

-- name: list_tokens
-- A machine's tokens, revoked ones too, newest first, after a (time, id) key; with $5 that one. Index:
-- machine_daemon_tokens_machine.
select id, org_id, machine_id, name, metadata::text as metadata, created_at, last_used_at, revoked_at, revoke_reason
from machine_daemon_tokens
where machine_id = $1 and ($2::timestamptz is null or (created_at, id) < ($2, $3::uuid))
  and ($5::uuid is null or id = $5)
order by created_at desc, id desc limit $4;

-- name: revoke_token
-- Make a token of a locked machine worthless; a second time changes nothing. Index: machine_daemon_tokens_pkey.
update machine_daemon_tokens set revoked_at = statement_timestamp(), revoke_reason = $3
where machine_id = $1 and id = $2 and revoked_at is null returning id;

-- name: connected_machines
-- Some machines that an organization connected itself. Index: machines_newest.
select id from machines where org_id = $1 and source_kind = 'byo' and deleted_at is null order by created_at, id limit $2;

-- name: machine_bindings
-- Agents, of all projects or of $2, to which a locked machine is attached. Index: agent_machine_bindings_of_machine.
select id, agent_id from agent_machine_bindings
where machine_id = $1 and state = 'attached' and ($2::uuid is null or project_id = $2)
order by agent_id;

-- name: release_machine_bindings
-- Detach a locked machine from all agents, which are locked. Index: agent_machine_bindings_of_machine.
update agent_machine_bindings set state = 'released', updated_at = statement_timestamp()
where machine_id = $1 and state = 'attached';

-- name: undeleted_pool_machines
-- Machines of a pool ($1) or of a pool's grant ($2) that are not being deleted yet. Index: machines_pool.
select id from machines
where deleted_at is null and lifecycle_state not in ('deleting', 'delete_failed')
  and pool_id = $1 and ($2::uuid is null or pool_grant_id = $2)
order by id;
