-- name: bound_machines
-- The machines that an agent has, oldest binding first, with what its tools need to know of them. `offline_s`: seconds since
-- the machine was last heard of; null while it is online or asleep. `served_s`: seconds for which it could have been heard,
-- since Postgres and the oldest living process began. `granted`: its project may use it.
-- Index: agent_machine_bindings_attached, machines_pkey, machine_runtimes_pkey, machine_grants_machine, workers_live.
select b.id, b.machine_id, b.machine_ref, b.binding_kind, b.source_key, b.description, b.cwd, b.env_overlay,
       b.secret_env_overlay, m.display_name, m.description as machine_description, m.provider, m.cwd as machine_cwd, m.env,
       m.secret_env, m.observed_platform, m.cpu, m.memory_mb, m.lifecycle_state, m.lifecycle_reason_code,
       m.lifecycle_reason_message, m.failure_report, m.pool_id, m.created_at,
       m.asleep_since is not null as asleep,
       case when m.asleep_since is not null then null
            when r.state = 'active' and r.disconnected_at is null and r.lease_expires_at > statement_timestamp() then null
            else extract(epoch from statement_timestamp() - coalesce(
                   least(r.disconnected_at, r.lease_expires_at, r.ended_at), m.activated_at, m.created_at))::float8
       end as offline_s,
       extract(epoch from statement_timestamp() - greatest(pg_postmaster_start_time(),
         (select min(w.started_at) from workers w where w.state = 'live')))::float8 as served_s,
       b.created_at as bound_at,
       r.id is not null as seen,
       exists (select from machine_grants g
                where g.project_id = b.project_id and g.machine_id = b.machine_id and g.deleted_at is null) as granted
from agent_machine_bindings b
join machines m on m.id = b.machine_id
left join machine_runtimes r on r.id = m.current_runtime_id
where b.agent_id = $1 and b.state = 'attached'
order by b.created_at, b.id;

-- name: list_bindings
-- The bindings of an agent as they are shown, in the order in which they were made. Index: agent_machine_bindings_ref.
select id, project_id, agent_id, machine_id, machine_ref, binding_kind, state, description, cwd, env_overlay,
       secret_env_overlay, created_at, updated_at
from agent_machine_bindings where agent_id = $1 and state = 'attached' order by created_at, id;

-- name: insert_binding
-- Attach a machine; no row when the agent has used the machine_ref before. The hot row is locked.
insert into agent_machine_bindings (id, org_id, project_id, agent_id, machine_id, machine_ref, binding_kind, source_key,
                                    description, cwd, env_overlay, secret_env_overlay)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11::jsonb, $12::jsonb)
on conflict (agent_id, machine_ref) do nothing
returning id;

-- name: free_ref
-- Give the released binding that has a machine_ref another one, so that a new binding can take it. The hot row is locked.
-- Index: agent_machine_bindings_ref.
update agent_machine_bindings set machine_ref = $3, updated_at = statement_timestamp()
where agent_id = $1 and machine_ref = $2 and state = 'released';

-- name: change_binding
-- What another config says about an attached machine. The hot row is locked. Index: agent_machine_bindings_pkey.
update agent_machine_bindings set machine_ref = $2, description = $3, cwd = $4, env_overlay = $5::jsonb,
  secret_env_overlay = $6::jsonb, updated_at = statement_timestamp()
where id = $1;

-- name: release_bindings
-- Detach machines; those that are released already stay as they are. The hot row is locked.
-- Index: agent_machine_bindings_pkey.
update agent_machine_bindings set state = 'released', updated_at = statement_timestamp()
where id = any($1::uuid[]) and state = 'attached';

-- name: source_machines
-- Machines of an organization that a config may mean by an id, or by the name of one that somebody connected, and whether
-- the project may use them. Index: machines_pkey, machines_newest, machine_grants_machine.
select m.id, m.source_kind,
       exists (select from machine_grants g
                where g.project_id = $2 and g.machine_id = m.id and g.deleted_at is null) as granted
from machines m
where m.org_id = $1 and m.deleted_at is null and m.lifecycle_state not in ('deleting', 'delete_failed')
  and (m.id = $3 or ($3 is null and m.source_kind = 'byo' and m.display_name = $4))
order by m.created_at limit 2;

-- name: source_pools
-- The pool of an organization that a config means by an id or by its name, whether the project may use it, and the provider's
-- options of machines there. Index: machine_pools_pkey, machine_pools_name, machine_pool_grants_pool.
select p.id, g.id is not null as granted, p.provider, p.provider_config,
       p.default_machine_provider_options || coalesce(g.default_machine_provider_options_overlay, '{}') as options
from machine_pools p
left join machine_pool_grants g on g.project_id = $2 and g.pool_id = p.id and g.deleted_at is null
where p.org_id = $1 and p.deleted_at is null and (p.id = $3 or ($3 is null and p.name = $4));

-- name: pool_names
-- Names of pools that a project may still use, for a model. Index: machine_pools_pkey, machine_pool_grants_pool.
select p.id, p.name, coalesce(nullif(g.description, ''), p.description) as description
from machine_pools p
join machine_pool_grants g on g.pool_id = p.id and g.project_id = $1 and g.deleted_at is null
where p.id = any($2::uuid[]) and p.deleted_at is null order by p.name;

-- name: lock_pools
-- Lock pools against other admissions, in order of id: before any agent, as machines are. Index: machine_pools_pkey.
select id from machine_pools where id = any($1::uuid[]) and deleted_at is null order by id for no key update;

-- name: locked_pool
-- A locked pool with the project's grant, and what counts against their limits: every machine that is not deleted.
-- Index: machine_pools_pkey, machine_pool_grants_pool, machines_pool.
select p.id, g.id as grant_id, p.name, p.provider, p.default_machine_cpu, p.default_machine_memory_mb,
       p.default_machine_env, p.default_machine_secret_env, p.default_machine_provider_options, p.default_cwd,
       p.max_total_machines, p.max_total_cpu, p.max_total_memory_mb, p.min_machine_cpu, p.min_machine_memory_mb,
       p.max_machine_cpu, p.max_machine_memory_mb, p.delete_after_idle_minutes,
       g.default_machine_cpu as grant_cpu, g.default_machine_memory_mb as grant_memory_mb,
       g.default_machine_env_overlay as grant_env, g.default_machine_secret_env_overlay as grant_secret_env,
       g.default_machine_provider_options_overlay as grant_options, g.default_cwd as grant_cwd,
       g.max_total_machines as grant_max_machines, g.max_total_cpu as grant_max_cpu,
       g.max_total_memory_mb as grant_max_memory_mb, g.min_machine_cpu as grant_min_cpu,
       g.min_machine_memory_mb as grant_min_memory_mb, g.max_machine_cpu as grant_max_machine_cpu,
       g.max_machine_memory_mb as grant_max_machine_memory_mb, g.delete_after_idle_minutes as grant_idle_minutes,
       u.machines, u.cpu, u.memory_mb, u.project_machines, u.project_cpu, u.project_memory_mb, u.agent_machines
from machine_pools p
join machine_pool_grants g on g.pool_id = p.id and g.project_id = $2 and g.deleted_at is null
cross join lateral (
  select count(*) as machines, coalesce(sum(m.cpu), 0) as cpu, coalesce(sum(m.memory_mb), 0) as memory_mb,
         count(*) filter (where m.project_id = $2) as project_machines,
         coalesce(sum(m.cpu) filter (where m.project_id = $2), 0) as project_cpu,
         coalesce(sum(m.memory_mb) filter (where m.project_id = $2), 0) as project_memory_mb,
         count(*) filter (where b.agent_id is not null) as agent_machines
  from machines m
  left join agent_machine_bindings b
    on b.machine_id = m.id and b.agent_id = $3 and b.binding_kind = 'pool' and b.state = 'attached'
  where m.pool_id = p.id and m.deleted_at is null) u
where p.id = $1 and p.deleted_at is null;

-- name: insert_pool_machine
-- A machine that is to be provisioned, with its pool's metadata, and its project's right to use it. The pool is locked.
-- Index: machine_pools_pkey.
with m as (
  insert into machines (id, org_id, source_kind, pool_id, pool_grant_id, project_id, display_name, description, provider,
                        cwd, env, secret_env, cpu, memory_mb, provider_options, delete_after_idle_minutes,
                        lifecycle_state, next_reconcile_after, metadata)
  values ($1, $2, 'pool', $3, $4, $5, $6, $7, $8, $9, $10::jsonb, $11::jsonb, $12, $13, $14::jsonb, $15,
          'provisioning', statement_timestamp(), (select metadata from machine_pools where id = $3))
  returning id
)
insert into machine_grants (id, org_id, project_id, machine_id, pool_grant_id, source_kind)
select $16, $2, $5, m.id, $4, 'pool' from m;

-- name: lock_machines
-- Lock machines, in order of id: before any agent. Index: machines_pkey.
select id from machines where id = any($1::uuid[]) order by id for no key update;

-- name: lock_machines_at_once
-- Lock machines after their agent without waiting: one that somebody else holds is an error, after which the transaction
-- begins again and locks it in its place. Index: machines_pkey.
select id from machines where id = any($1::uuid[]) order by id for no key update nowait;

-- name: share_machines
-- Keep machines from being deleted or withdrawn, in order of id: before any agent that others may lock. Index: machines_pkey.
select id from machines where id = any($1::uuid[]) order by id for share;

-- name: keep_machine
-- Keep a machine that is attached now from being deleted, without waiting; no row when it is gone or will be.
-- Index: machines_pkey.
select id from machines
where id = $1 and deleted_at is null and lifecycle_state not in ('deleting', 'delete_failed') for share nowait;

-- name: delete_machines
-- Pool machines that are to be deleted, and that no project has any more. They are locked. Index: machines_pkey,
-- machine_grants_of_machine.
with m as (
  update machines set lifecycle_state = 'deleting', lifecycle_version = lifecycle_version + 1, lifecycle_reason_code = $2,
    lifecycle_reason_message = '', delete_attempts = 0, next_reconcile_after = statement_timestamp(),
    updated_at = statement_timestamp()
  where id = any($1::uuid[]) and source_kind = 'pool'
    and lifecycle_state in ('provisioning', 'provision_failed', 'active')
  returning id),
g as (
  update machine_grants g set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
  from m where g.machine_id = m.id and g.deleted_at is null)
select id from m;

-- name: own_pool
-- The pool that this cluster keeps for an organization, under a name of its own. Index: machine_pools_name.
select id, provider from machine_pools
where org_id = $1 and name = $2 and management_kind = 'cluster' and deleted_at is null;

-- name: insert_own_pool
-- That pool; nothing when somebody made it meanwhile, or a pool has its name. Index: machine_pools_name.
insert into machine_pools (id, org_id, name, description, management_kind, provider, max_total_machines)
values ($1, $2, $3, $4, 'cluster', $5, $6)
on conflict do nothing;

-- name: grant_own_pool
-- Let a project use that pool; nothing when it may already. Index: machine_pool_grants_pool.
insert into machine_pool_grants (id, org_id, project_id, pool_id) values ($1, $2, $3, $4)
on conflict do nothing;
