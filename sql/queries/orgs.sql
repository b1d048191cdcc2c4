-- name: add_org
-- A new organization; no row when its id is taken (waits for the other transaction first). Index: orgs_pkey.
insert into orgs (id, name) values ($1, $2) on conflict (id) do nothing
returning id, name, created_at, updated_at;

-- name: find_org
-- An organization, deleted or not. Index: orgs_pkey.
select id, name, created_at, updated_at, deleted_at is not null as deleted from orgs where id = $1;

-- name: list_orgs
-- The organizations among $1, newest first, after a (time, id) key. Index: orgs_pkey.
select id, name, created_at, updated_at from orgs
where id = any($1::uuid[]) and deleted_at is null
  and ($2::timestamptz is null or (created_at, id) < ($2, $3::uuid))
order by created_at desc, id desc limit $4;

-- name: lock_org
-- Lock an organization against parallel creations and deletions inside it. Index: orgs_pkey.
select id from orgs where id = $1 and deleted_at is null for no key update;

-- name: lock_user
-- Lock a user against parallel creations of organizations. Index: users_pkey.
select id from users where id = $1 and deleted_at is null for no key update;

-- name: count_user_orgs
-- In how many organizations a user is. Index: org_members_user.
select count(*)::integer
from org_members m join orgs o on o.id = m.org_id and o.deleted_at is null where m.user_id = $1;

-- name: count_projects
-- How many projects an organization has. Index: projects_newest.
select count(*)::integer from projects where org_id = $1 and deleted_at is null;

-- name: recent_agents
-- The agents among these projects that changed last. Index: agents_newest.
select a.id, a.org_id, a.project_id, a.name, a.current_config_id, a.created_at, a.updated_at, a.archived_at,
       p.name as provider_config, m.name as model
from agents a
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id
join model_provider_configs p on p.id = m.provider_config_id
where a.org_id = $1 and a.project_id = any($2::uuid[]) and a.archived_at is null
order by a.updated_at desc, a.id desc limit $3;

-- name: add_member
-- A user's role in an organization. Index: org_members_pkey.
insert into org_members (org_id, user_id, role) values ($1, $2, $3)
returning org_id, user_id, role, created_at;

-- name: member
-- A user's role in an organization. Index: org_members_pkey.
select org_id, user_id, role, created_at from org_members where org_id = $1 and user_id = $2;

-- name: add_project
-- A new project. Index: projects_key, projects_name.
insert into projects (id, org_id, name, idempotency_key) values ($1, $2, $3, $4)
returning id, org_id, name, created_at, updated_at;

-- name: project_by_key
-- The project that an Idempotency-Key made, deleted or not. Index: projects_key.
select id, org_id, name, created_at, updated_at, deleted_at is not null as deleted
from projects where org_id = $1 and idempotency_key = $2;

-- name: project_by_name
-- An active project by name. Index: projects_name.
select id, org_id, name, created_at, updated_at
from projects where org_id = $1 and name = $2 and deleted_at is null;

-- name: project_of_org
-- An active project of an organization. Index: projects_pkey.
select id, org_id, name, created_at, updated_at
from projects where id = $2 and org_id = $1 and deleted_at is null;

-- name: oldest_project
-- The first project of an organization, deleted or not: the one that was made with it. Nobody asks often, so the table is
-- read: no index leads to deleted projects.
select id, org_id, name, created_at, updated_at from projects where org_id = $1 order by created_at, id limit 1;

-- name: add_project_user
-- A user's role in a project; an existing one is replaced. Index: project_members_pkey.
insert into project_members (project_id, user_id, role) values ($1, $2, $3)
on conflict (project_id, user_id) do update set role = excluded.role
returning created_at;

-- name: add_project_key
-- An organization key's role in a project; an existing one is replaced. Index: org_api_key_projects_pkey.
insert into org_api_key_projects (key_id, project_id, role) values ($2, $1, $3)
on conflict (key_id, project_id) do update set role = excluded.role
returning created_at;

-- name: grant_environment_models
-- Let a new project use what the environment offers its organization, as every start does for the older projects.
insert into project_model_grants (id, project_id, configured_model_id)
select m.new_id, $2, m.id
from unnest($3::uuid[], $4::uuid[]) m (new_id, id)
join configured_models c on c.id = m.id and c.org_id = $1 and c.deleted_at is null
on conflict (project_id, configured_model_id) do nothing;

-- name: environment_models
-- The models of an organization that the environment keeps. Index: configured_models_name.
select m.id from configured_models m
join model_provider_configs p on p.id = m.provider_config_id and p.deleted_at is null and p.origin = 'environment'
where m.org_id = $1 and m.deleted_at is null order by m.created_at, m.id;

-- name: lock_project
-- Lock an active project of an organization; who inserts an agent waits meanwhile. Index: projects_pkey.
select id from projects where id = $2 and org_id = $1 and deleted_at is null for update;

-- name: active_agents
-- Some agents of a project that are not archived, after a (time, id) key. Index: agents_newest.
select id, created_at from agents
where project_id = $1 and archived_at is null and ($3::timestamptz is null or (created_at, id) < ($3, $4::uuid))
order by created_at desc, id desc limit $2;

-- name: mark_project_deleted
-- Hide a project for good; its agents are archived afterwards. Index: projects_pkey.
update projects set deleted_at = statement_timestamp(), updated_at = statement_timestamp(), emptying = true where id = $1;

-- name: emptying_projects
-- Deleted projects whose agents may not all be archived, oldest first; of one organization ($1) or of all.
-- Index: projects_emptying.
select id, org_id from projects where emptying and ($1::uuid is null or org_id = $1) order by deleted_at limit 100;

-- name: lock_emptying_project
-- Lock a deleted project that is being emptied. Index: projects_pkey.
select id from projects where id = $1 and emptying for update;

-- name: mark_project_empty
-- Nothing is left of a deleted project. The first one of a deleted organization keeps its mark: it stands for what the
-- organization itself still has, and has its mark since the organization was hidden. The project is locked.
-- Index: projects_pkey, orgs_pkey, projects_emptying.
update projects p
set emptying = exists (select from orgs o where o.id = p.org_id and o.deleted_at is not null)
               and not exists (select from projects q where q.emptying and q.org_id = p.org_id
                                                        and (q.created_at, q.id) < (p.created_at, p.id))
where p.id = $1;

-- name: drop_project_model_grants
-- Take its models from a project. Index: unique key of grants.
delete from project_model_grants where project_id = $1;

-- name: drop_project_secret_grants
-- Take granted secrets from a project, and its own secrets from other projects. Index: secret_grants_project.
delete from secret_grants g
where g.project_id = $1 or g.secret_id in (select id from secrets where owner_project_id = $1);

-- name: destroy_project_secrets
-- Destroy the values of a project's own secrets for good. Index: secret_versions_pkey.
delete from secret_versions v using secrets s where s.owner_project_id = $1 and v.secret_id = s.id;

-- name: mark_project_secrets_deleted
-- Hide a project's own secrets.
update secrets set deleted_at = statement_timestamp() where owner_project_id = $1 and deleted_at is null;

-- name: drop_project_members
-- Take everybody's role in a project. Index: project_members_pkey.
delete from project_members where project_id = $1;

-- name: drop_project_keys
-- Take every key's role in a project. Index: org_api_key_projects_project.
delete from org_api_key_projects where project_id = $1;

-- name: active_projects
-- The projects of an organization. Index: projects_newest.
select id from projects where org_id = $1 and deleted_at is null order by created_at, id;

-- name: mark_org_deleted
-- Hide an organization for good. Index: orgs_pkey.
update orgs set deleted_at = statement_timestamp(), updated_at = statement_timestamp() where id = $1;

-- name: mark_org_emptying
-- Something may be left of a deleted organization, which its first project stands for: read from the table, once in the
-- organization's life. Index: projects_pkey.
update projects set emptying = true
where id = (select id from projects where org_id = $1 order by created_at, id limit 1);

-- name: org_leftovers
-- Whether an organization is deleted, and its projects that are still marked. Index: orgs_pkey, projects_emptying.
select o.deleted_at is not null as deleted, array(select p.id from projects p where p.emptying and p.org_id = o.id) as projects
from orgs o where o.id = $1;

-- name: lock_deleted_org
-- Lock a deleted organization, so that one at a time finishes it. Index: orgs_pkey.
select id from orgs where id = $1 and deleted_at is not null for update;

-- name: mark_org_empty
-- Nothing is left of a locked, deleted organization; unless its secrets still serve. Index: projects_emptying,
-- machines_newest, machine_pools_pkey.
update projects set emptying = false
where org_id = $1 and emptying
  and not exists (select from machines m join machine_pools p on p.id = m.pool_id
                  where m.org_id = $1 and m.deleted_at is null and p.provider_auth_secret_id is not null);

-- name: revoke_org_keys
-- Revoke every key of an organization. Index: org_api_keys_newest.
update org_api_keys set revoked_at = statement_timestamp(), org_role = null, updated_at = statement_timestamp()
where org_id = $1 and revoked_at is null;

-- name: mark_org_models_deleted
-- Hide an organization's configured models.
update configured_models set deleted_at = statement_timestamp() where org_id = $1 and deleted_at is null;

-- name: mark_org_providers_deleted
-- Hide an organization's providers and part them from their keys. Index: model_provider_configs_name.
update model_provider_configs set deleted_at = statement_timestamp(), secret_id = null
where org_id = $1 and deleted_at is null;

-- name: destroy_org_secrets
-- Destroy the values of an organization's secrets for good, but for those without which a provider would not remove what is
-- left of its machines. Index: secret_versions_pkey, machines_newest, machine_pools_pkey.
delete from secret_versions v using secrets s
where s.org_id = $1 and v.secret_id = s.id
  and not exists (select from machines m join machine_pools p on p.id = m.pool_id
                  where m.org_id = $1 and m.deleted_at is null and p.provider_auth_secret_id = s.id);

-- name: drop_org_secret_grants
-- Take an organization's secrets from its projects.
delete from secret_grants g using secrets s where s.org_id = $1 and g.secret_id = s.id;

-- name: mark_org_secrets_deleted
-- Hide an organization's secrets. Index: secrets_name.
update secrets set deleted_at = statement_timestamp() where org_id = $1 and deleted_at is null;
