-- name: insert_secret
-- A secret's record; its value is a version.
insert into secrets (id, org_id, owner_kind, name, kind, description) values ($1, $2, $3, $4, $5, $6);

-- name: find_system_secret
-- A secret that the system keeps for an organization, by name. Index: secrets_name.
select id from secrets
where org_id = $1 and owner_kind = 'system' and coalesce(owner_project_id, owner_user_id, org_id) = $1 and name = $2
  and deleted_at is null;

-- name: insert_version
-- A sealed value. Index: secret_versions_pkey.
insert into secret_versions (secret_id, version, key_id, wrapped_key, nonce, ciphertext, payload_keys)
values ($1, $2, $3, $4, $5, $6, $7);

-- name: set_current_version
-- Point a secret at a version. Index: secrets_pkey.
update secrets set current_version = $2, updated_at = statement_timestamp() where id = $1;

-- name: current_version
-- A secret's current sealed value. Index: secrets_pkey, secret_versions_pkey.
select s.id, s.name, s.current_version as version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext
from secrets s join secret_versions v on v.secret_id = s.id and v.version = s.current_version
where s.id = $1 and s.deleted_at is null;

-- name: sealed_by_others
-- Versions whose data key is not wrapped by the ring key $1, in order after ($2, $3). Index: secret_versions_pkey.
select v.secret_id as id, s.name, v.version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext
from secret_versions v join secrets s on s.id = v.secret_id
where v.key_id <> $1 and (v.secret_id, v.version) > ($2, $3)
order by v.secret_id, v.version limit $4;

-- name: rewrap_version
-- Wrap a version's data key anew, unless somebody else has meanwhile. The ciphertext stays. Index: secret_versions_pkey.
update secret_versions set key_id = $3, wrapped_key = $4
where secret_id = $1 and version = $2 and key_id = $5;

-- name: add_owned_secret
-- A secret of an organization, a project or a user; no row when its name is taken (waits for the other transaction
-- first). Index: secrets_name.
insert into secrets (id, org_id, owner_kind, owner_project_id, owner_user_id, name, kind, metadata)
values ($1, $2, $3, $4, $5, $6, $7, $8::jsonb)
on conflict do nothing
returning id;

-- name: count_secrets
-- How many secrets an organization has. Index: secrets_name.
select count(*)::integer from secrets where org_id = $1 and deleted_at is null and owner_kind <> 'system';

-- name: owned_secret
-- A secret as it is shown; never one that the system keeps. Index: secrets_pkey, secret_versions_pkey.
select s.id, s.org_id, s.owner_kind, s.owner_project_id, s.owner_user_id, s.name, s.kind, s.metadata,
       s.current_version, v.payload_keys, s.created_at, s.updated_at
from secrets s join secret_versions v on v.secret_id = s.id and v.version = s.current_version
where s.id = $2 and s.org_id = $1 and s.owner_kind <> 'system' and s.deleted_at is null;

-- name: lock_owned_secret
-- Lock a secret against parallel versions, uses and deletion. Index: secrets_pkey.
select id from secrets
where id = $2 and org_id = $1 and owner_kind <> 'system' and deleted_at is null for update;

-- name: share_generic_secret
-- Keep a generic secret of an organization from being deleted while something begins to use it. Index: secrets_pkey.
select id from secrets
where id = $2 and org_id = $1 and owner_kind = 'org' and kind = 'generic' and deleted_at is null for share;

-- name: list_secrets
-- Secrets by owner as far as the caller ($8: those of the organization and of all projects, $9: of these projects,
-- $10: of this user) may list them. Index: secrets_name.
select l.* from (
  select case $1::text when 'name' then s.name
              else to_char(case $1::text when 'updated_at' then s.updated_at else s.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         s.id, s.org_id, s.owner_kind, s.owner_project_id, s.owner_user_id, s.name, s.kind, s.metadata,
         s.current_version, v.payload_keys, s.created_at, s.updated_at
  from secrets s join secret_versions v on v.secret_id = s.id and v.version = s.current_version
  where s.org_id = $7 and s.deleted_at is null
    and (($8::boolean and s.owner_kind in ('org', 'project')) or s.owner_project_id = any($9::uuid[])
         or s.owner_user_id = $10::uuid)
    and ($11::text is null or s.kind = $11) and ($12::text is null or s.owner_kind = $12)
    and ($13::uuid is null or s.owner_project_id = $13) and ($14::jsonb is null or s.metadata @> $14)) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: list_available_secrets
-- What a project may use: its own secrets and those granted to it. Index: secrets_name, secret_grants_project.
select l.* from (
  select case $1::text when 'name' then s.name
              else to_char(case $1::text when 'updated_at' then s.updated_at else s.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         s.id, s.org_id, s.owner_kind, s.owner_project_id, s.owner_user_id, s.name, s.kind, s.metadata,
         s.current_version, v.payload_keys, s.created_at, s.updated_at, g.id as grant_id
  from secrets s
  join secret_versions v on v.secret_id = s.id and v.version = s.current_version
  left join secret_grants g on g.secret_id = s.id and g.project_id = $8
  where s.org_id = $7 and s.deleted_at is null and (s.owner_project_id = $8 or g.id is not null)
    and ($9::text is null or s.kind = $9) and ($10::text is null or s.owner_kind = $10)
    and ($11::text is null or ($11 = 'direct') = (s.owner_project_id is not distinct from $8))
    and ($12::jsonb is null or s.metadata @> $12) and ($13::uuid is null or s.id = $13)) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: change_secret
-- Rename a locked secret or replace its metadata; what is null stays. Index: secrets_pkey.
update secrets set name = coalesce($2, name), metadata = coalesce($3::jsonb, metadata), updated_at = statement_timestamp()
where id = $1;

-- name: secret_in_use
-- What uses a locked secret of an organization: a model provider, or machines and what machines are made from. Nobody asks
-- often, so environments are read one by one. Index: model_provider_configs_secret, machines_newest, machine_pools_newest.
select case
  when exists (select from model_provider_configs where secret_id = $1 and deleted_at is null) then 'model provider'
  when exists (select from machine_pools p
               where p.org_id = $2
                 and (p.deleted_at is null or exists (select from machines m where m.pool_id = p.id and m.deleted_at is null))
                 and (p.provider_auth_secret_id = $1
                      or exists (select from jsonb_each_text(p.default_machine_secret_env) e where e.value = $1::text)))
  then 'machine pool'
  when exists (select from machine_pool_grants g, jsonb_each_text(g.default_machine_secret_env_overlay) e
               where g.org_id = $2 and g.deleted_at is null and e.value = $1::text) then 'machine pool grant'
  when exists (select from machines m, jsonb_each_text(m.secret_env) e
               where m.org_id = $2 and m.deleted_at is null and e.value = $1::text) then 'machine' end as used;

-- name: drop_grants
-- Take a secret from every project. Index: unique key of secret_grants.
delete from secret_grants where secret_id = $1;

-- name: drop_versions
-- Destroy every version of a secret for good. Index: secret_versions_pkey.
delete from secret_versions where secret_id = $1;

-- name: mark_deleted
-- Hide a secret. Index: secrets_pkey.
update secrets set deleted_at = statement_timestamp(), updated_at = statement_timestamp() where id = $1;

-- name: add_grant
-- Let a project use a secret; no row when it may already. Index: unique key of secret_grants.
insert into secret_grants (id, secret_id, project_id) values ($1, $2, $3)
on conflict (secret_id, project_id) do nothing returning id, secret_id, project_id, created_at;

-- name: drop_grant
-- Take a secret from a project. Index: secret_grants_pkey.
delete from secret_grants where id = $2 and secret_id = $1 returning id;

-- name: list_grants
-- The projects that may use a secret. Index: unique key of secret_grants.
select l.* from (
  select case $1::text when 'name' then p.name
              else to_char(g.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         g.id, g.secret_id, g.project_id, g.created_at,
         p.org_id, p.name, p.created_at as project_created_at, p.updated_at as project_updated_at
  from secret_grants g join projects p on p.id = g.project_id and p.deleted_at is null
  where g.secret_id = $7) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;
