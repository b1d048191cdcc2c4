-- name: add_pool
-- A pool made by API; no row when its name is taken (waits for the other transaction first). Index: machine_pools_name.
insert into machine_pools (id, org_id, provider, name, description, provider_config, provider_auth_secret_id,
                           default_machine_env, default_machine_secret_env, default_machine_provider_options, default_cwd,
                           runtime_protection_enabled, metadata, max_total_machines, delete_after_idle_minutes,
                           default_machine_cpu, default_machine_memory_mb, max_total_cpu, max_total_memory_mb,
                           min_machine_cpu, min_machine_memory_mb, max_machine_cpu, max_machine_memory_mb)
values ($1, $2, $3, $4, $5, $6::jsonb, $7, $8::jsonb, $9::jsonb, $10::jsonb, $11, $12, $13::jsonb, $14, $15, $16, $17, $18,
        $19, $20, $21, $22, $23)
on conflict (org_id, name) where deleted_at is null do nothing returning id;

-- name: count_pools
-- How many pools an organization has. Index: machine_pools_newest.
select count(*)::integer from machine_pools where org_id = $1 and deleted_at is null;

-- name: lock_pool
-- Lock a pool against parallel changes, grants and deletion; who admits a machine waits too. Index: machine_pools_pkey.
select id from machine_pools where org_id = $1 and id = $2 and deleted_at is null for no key update;

-- name: find_pool
-- A pool by id ($2) or by name ($3). Index: machine_pools_pkey, machine_pools_name.
select p.id, p.org_id, p.provider, p.management_kind, p.created_at, p.updated_at,
       p.name, p.description, p.provider_config::text as provider_config, p.provider_auth_secret_id,
       p.default_machine_env::text as default_machine_env, p.default_machine_secret_env::text as default_machine_secret_env,
       p.default_machine_provider_options::text as default_machine_provider_options, p.default_cwd,
       p.runtime_protection_enabled, p.metadata::text as metadata, p.max_total_machines, p.delete_after_idle_minutes,
       p.default_machine_cpu, p.default_machine_memory_mb, p.max_total_cpu, p.max_total_memory_mb, p.min_machine_cpu,
       p.min_machine_memory_mb, p.max_machine_cpu, p.max_machine_memory_mb
from machine_pools p
where p.org_id = $1 and p.deleted_at is null and (p.id = $2::uuid or p.name = $3::text);

-- name: list_pools
-- The pools of an organization with what their machines take up. Index: machine_pools_newest, machines_pool.
select l.*, u.machines, u.cpu, u.memory_mb from (
  select case $1::text when 'name' then p.name
              else to_char(case $1::text when 'updated_at' then p.updated_at else p.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         p.id, p.org_id, p.provider, p.management_kind, p.created_at, p.updated_at,
         p.name, p.description, p.provider_config::text as provider_config, p.provider_auth_secret_id,
         p.default_machine_env::text as default_machine_env,
         p.default_machine_secret_env::text as default_machine_secret_env,
         p.default_machine_provider_options::text as default_machine_provider_options, p.default_cwd,
         p.runtime_protection_enabled, p.metadata::text as metadata, p.max_total_machines, p.delete_after_idle_minutes,
         p.default_machine_cpu, p.default_machine_memory_mb, p.max_total_cpu, p.max_total_memory_mb, p.min_machine_cpu,
         p.min_machine_memory_mb, p.max_machine_cpu, p.max_machine_memory_mb
  from machine_pools p where p.org_id = $7 and p.deleted_at is null) l
cross join lateral (
  select count(*)::integer as machines, coalesce(sum(m.cpu), 0)::bigint as cpu,
         coalesce(sum(m.memory_mb), 0)::bigint as memory_mb
  from machines m where m.pool_id = l.id and m.deleted_at is null) u
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: change_pool
-- Replace the settings of a locked pool; the provider stays. Index: machine_pools_pkey, machine_pools_name.
update machine_pools
set name = $2, description = $3, provider_config = $4::jsonb, provider_auth_secret_id = $5,
    default_machine_env = $6::jsonb, default_machine_secret_env = $7::jsonb,
    default_machine_provider_options = $8::jsonb, default_cwd = $9, runtime_protection_enabled = $10,
    metadata = $11::jsonb, max_total_machines = $12, delete_after_idle_minutes = $13, default_machine_cpu = $14,
    default_machine_memory_mb = $15, max_total_cpu = $16, max_total_memory_mb = $17, min_machine_cpu = $18,
    min_machine_memory_mb = $19, max_machine_cpu = $20, max_machine_memory_mb = $21,
    updated_at = statement_timestamp()
where id = $1;

-- name: mark_pool_deleted
-- Hide a locked pool. Its credential stays until its last machine is removed. Index: machine_pools_pkey.
update machine_pools set deleted_at = statement_timestamp(), updated_at = statement_timestamp() where id = $1;

-- name: drop_pool_grants
-- Take a locked pool from every project. Index: machine_pool_grants_of_pool.
update machine_pool_grants set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
where pool_id = $1 and deleted_at is null;

-- name: add_pool_grant
-- Let a project use a locked pool; no row when it may already, or when the idempotency key is used.
-- Index: machine_pool_grants_pool, machine_pool_grants_key.
insert into machine_pool_grants (id, org_id, project_id, pool_id, idempotency_key, description,
                                 default_machine_env_overlay, default_machine_secret_env_overlay,
                                 default_machine_provider_options_overlay, default_cwd, metadata, max_total_machines,
                                 delete_after_idle_minutes, default_machine_cpu, default_machine_memory_mb,
                                 max_total_cpu, max_total_memory_mb, min_machine_cpu, min_machine_memory_mb,
                                 max_machine_cpu, max_machine_memory_mb)
values ($1, $2, $3, $4, $5, $6, $7::jsonb, $8::jsonb, $9::jsonb, $10, $11::jsonb, $12, $13, $14, $15, $16, $17, $18, $19,
        $20, $21)
on conflict do nothing returning id;

-- name: find_pool_grant
-- A project's grant of a pool by its id ($2), pool ($3) or idempotency key ($4); by key a deleted one, too.
-- Index: machine_pool_grants_pkey, machine_pool_grants_pool, machine_pool_grants_key.
select g.id, g.org_id, g.project_id, g.pool_id, g.created_at, g.updated_at, g.deleted_at,
       g.description, g.default_machine_env_overlay::text as default_machine_env_overlay,
       g.default_machine_secret_env_overlay::text as default_machine_secret_env_overlay,
       g.default_machine_provider_options_overlay::text as default_machine_provider_options_overlay, g.default_cwd,
       g.metadata::text as metadata, g.max_total_machines, g.delete_after_idle_minutes, g.default_machine_cpu,
       g.default_machine_memory_mb, g.max_total_cpu, g.max_total_memory_mb, g.min_machine_cpu, g.min_machine_memory_mb,
       g.max_machine_cpu, g.max_machine_memory_mb
from machine_pool_grants g
where g.project_id = $1
  and (g.idempotency_key = $4::text or (g.deleted_at is null and (g.id = $2::uuid or g.pool_id = $3::uuid)));

-- name: list_pool_grants
-- The pools that a project may use, with what differs from them. Index: machine_pool_grants_pool.
select l.* from (
  select case $1::text when 'name' then p.name
              else to_char(case $1::text when 'updated_at' then g.updated_at else g.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         g.id, g.org_id, g.project_id, g.pool_id, g.created_at, g.updated_at, g.deleted_at,
         g.description, g.default_machine_env_overlay::text as default_machine_env_overlay,
         g.default_machine_secret_env_overlay::text as default_machine_secret_env_overlay,
         g.default_machine_provider_options_overlay::text as default_machine_provider_options_overlay, g.default_cwd,
         g.metadata::text as metadata, g.max_total_machines, g.delete_after_idle_minutes, g.default_machine_cpu,
         g.default_machine_memory_mb, g.max_total_cpu, g.max_total_memory_mb, g.min_machine_cpu,
         g.min_machine_memory_mb, g.max_machine_cpu, g.max_machine_memory_mb,
         p.name, p.management_kind, p.description as pool_description, p.provider, p.created_at as pool_created_at,
         p.updated_at as pool_updated_at
  from machine_pool_grants g join machine_pools p on p.id = g.pool_id and p.deleted_at is null
  where g.project_id = $7 and g.deleted_at is null) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: change_pool_grant
-- Replace what differs from the pool, whose row is locked. Index: machine_pool_grants_pkey.
update machine_pool_grants
set description = $2, default_machine_env_overlay = $3::jsonb, default_machine_secret_env_overlay = $4::jsonb,
    default_machine_provider_options_overlay = $5::jsonb, default_cwd = $6, metadata = $7::jsonb, max_total_machines = $8,
    delete_after_idle_minutes = $9, default_machine_cpu = $10, default_machine_memory_mb = $11, max_total_cpu = $12,
    max_total_memory_mb = $13, min_machine_cpu = $14, min_machine_memory_mb = $15, max_machine_cpu = $16,
    max_machine_memory_mb = $17, updated_at = statement_timestamp()
where id = $1;

-- name: drop_pool_grant
-- Take a pool from a project. Index: machine_pool_grants_pkey.
update machine_pool_grants set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
where project_id = $1 and id = $2 and deleted_at is null returning pool_id;

-- name: pool_granted_to
-- Whether one of these projects ($2) may use a pool. Index: machine_pool_grants_of_pool.
select exists (
  select from machine_pool_grants where pool_id = $1 and project_id = any($2::uuid[]) and deleted_at is null) as granted;

-- name: org_pools
-- Some pools of an organization, of any kind. Index: machine_pools_newest.
select id from machine_pools where org_id = $1 and deleted_at is null order by created_at, id limit $2;

-- name: project_pool_grants
-- Some pool grants of a project. Index: machine_pool_grants_pool.
select id from machine_pool_grants where project_id = $1 and deleted_at is null order by created_at, id limit $2;
