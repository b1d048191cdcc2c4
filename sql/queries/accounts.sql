-- name: personal_token_holder
-- The user behind a personal token, with every role, in one round trip. Owners and admins of an organization have admin
-- access to all its projects without a row. Index: personal_access_tokens_token_hash_key.
select t.id as key_id, u.id, u.display_name, null::text as org_role,
       coalesce(t.last_used_at < statement_timestamp() - interval '1 hour', true) as stale,
       array(select m.org_id from org_members m join orgs o on o.id = m.org_id and o.deleted_at is null
              where m.user_id = u.id order by o.created_at, o.id) as org_ids,
       array(select m.role from org_members m join orgs o on o.id = m.org_id and o.deleted_at is null
              where m.user_id = u.id order by o.created_at, o.id) as org_roles,
       coalesce(g.project_ids, '{}') as project_ids, coalesce(g.project_orgs, '{}') as project_orgs,
       coalesce(g.project_roles, '{}') as project_roles
from personal_access_tokens t
join users u on u.id = t.user_id and u.deleted_at is null
left join lateral (
  select array_agg(p.id order by p.created_at, p.id) as project_ids,
         array_agg(p.org_id order by p.created_at, p.id) as project_orgs,
         array_agg(case when m.role in ('owner', 'admin') then 'admin' else e.role end order by p.created_at, p.id)
           as project_roles
  from org_members m
  join projects p on p.org_id = m.org_id and p.deleted_at is null
  left join project_members e on e.project_id = p.id and e.user_id = m.user_id
  where m.user_id = u.id and (m.role in ('owner', 'admin') or e.role is not null)
) g on true
where t.token_hash = $1 and t.revoked_at is null;

-- name: org_key_holder
-- The organization key behind a token, with every role, in one round trip. A key with the admin role has admin access to
-- all projects of its organization without a row. Index: org_api_keys_token_hash_key.
select k.id as key_id, k.id, k.name as display_name, k.org_role,
       coalesce(k.last_used_at < statement_timestamp() - interval '1 hour', true) as stale,
       array[k.org_id] as org_ids, array[k.org_role] as org_roles,
       coalesce(g.project_ids, '{}') as project_ids, coalesce(g.project_orgs, '{}') as project_orgs,
       coalesce(g.project_roles, '{}') as project_roles
from org_api_keys k
join orgs o on o.id = k.org_id and o.deleted_at is null
left join lateral (
  select array_agg(p.id order by p.created_at, p.id) as project_ids,
         array_agg(p.org_id order by p.created_at, p.id) as project_orgs,
         array_agg(case when k.org_role = 'admin' then 'admin' else e.role end order by p.created_at, p.id)
           as project_roles
  from projects p
  left join org_api_key_projects e on e.project_id = p.id and e.key_id = k.id
  where p.org_id = k.org_id and p.deleted_at is null and (k.org_role = 'admin' or e.role is not null)
) g on true
where k.token_hash = $1 and k.revoked_at is null and k.org_role is not null;

-- name: touch_personal_token
-- Note the use of a token, at most once an hour; a row that somebody else is noting is left. Index: its pkey.
update personal_access_tokens set last_used_at = statement_timestamp()
where id = (select id from personal_access_tokens
             where id = $1 and coalesce(last_used_at < statement_timestamp() - interval '1 hour', true)
             for update skip locked);

-- name: touch_org_key
-- Note the use of a key, at most once an hour; a row that somebody else is noting is left. Index: its pkey.
update org_api_keys set last_used_at = statement_timestamp()
where id = (select id from org_api_keys
             where id = $1 and coalesce(last_used_at < statement_timestamp() - interval '1 hour', true)
             for update skip locked);

-- name: user_identity
-- Who a user is. Index: users_pkey.
select id, coalesce(email, '') as email, display_name from users where id = $1 and deleted_at is null;

-- name: user_orgs
-- A user's organizations by name. Index: org_members_user.
select o.id, o.name, m.role, o.created_at
from org_members m join orgs o on o.id = m.org_id and o.deleted_at is null
where m.user_id = $1 order by o.name, o.id;

-- name: list_projects
-- The projects among $2 of an organization, newest first, after a (time, id) key. Index: projects_newest.
select id, org_id, name, created_at, updated_at
from projects
where org_id = $1 and id = any($2::uuid[]) and deleted_at is null
  and ($3::timestamptz is null or (created_at, id) < ($3, $4::uuid))
order by created_at desc, id desc limit $5;

-- name: actor_id
-- The actor of an identity in a project, if there is one. Index: unique key of actors.
select id from actors
where project_id = $1 and provider = $2 and provider_tenant_id = $3 and provider_user_id = $4;

-- name: upsert_actor
-- Make or update an actor; what is null stays as it is. Index: unique key of actors.
insert into actors (id, org_id, project_id, provider, provider_tenant_id, provider_user_id, display_name, metadata)
values ($1, $2, $3, $4, $5, $6, $7, coalesce($8::jsonb, '{}'))
on conflict (project_id, provider, provider_tenant_id, provider_user_id) do update set
  display_name = coalesce($7, actors.display_name), metadata = coalesce($8::jsonb, actors.metadata),
  updated_at = statement_timestamp()
returning id;

-- name: installation_value
-- A fact of this database. Index: installation_pkey.
select value from installation where name = $1;

-- name: set_installation_value
-- Write a fact of this database.
insert into installation (name, value) values ($1, $2) on conflict (name) do update set value = excluded.value;

-- name: has_tables
-- Whether the first migration was applied: it makes the tables of organizations, projects and members at once.
select to_regclass('org_members') is not null;

-- name: first_org
-- The oldest organization with its oldest project and owner, deleted ones last, or no row in a new database.
select o.id as org_id, p.id as project_id, m.user_id
from orgs o
join projects p on p.org_id = o.id
join org_members m on m.org_id = o.id and m.role = 'owner'
order by o.deleted_at is not null, o.created_at, o.id, p.deleted_at is not null, p.created_at, p.id, m.created_at limit 1;

-- name: insert_org
-- A new organization.
insert into orgs (id, name) values ($1, $2);

-- name: insert_user
-- A new user.
insert into users (id, display_name) values ($1, $2);

-- name: insert_org_member
-- A user's role in an organization.
insert into org_members (org_id, user_id, role) values ($1, $2, $3);

-- name: insert_project
-- A new project.
insert into projects (id, org_id, name) values ($1, $2, $3);

-- name: insert_project_member
-- A user's role in a project.
insert into project_members (project_id, user_id, role) values ($1, $2, $3);

-- name: insert_personal_token
-- A personal token, by the hash of its text.
insert into personal_access_tokens (id, user_id, name, token_id, token_hash) values ($1, $2, $3, $4, $5)
returning id, user_id, name, token_id, created_at, last_used_at, revoked_at;

-- name: list_personal_tokens
-- A user's tokens that are not revoked, newest first. Index: personal_access_tokens_user.
select id, user_id, name, token_id, created_at, last_used_at, revoked_at
from personal_access_tokens where user_id = $1 and revoked_at is null order by created_at desc, id desc;

-- name: revoke_personal_token
-- Revoke a token by its visible id or its row id. Index: personal_access_tokens_token_id_key, pkey.
update personal_access_tokens set revoked_at = statement_timestamp()
where user_id = $1 and (token_id = $2 or id::text = $2) and revoked_at is null
returning id, user_id, name, token_id, created_at, last_used_at, revoked_at;

-- name: lock_setup
-- Try to be the one process that sets this database up, until the transaction ends. Never waits.
select pg_try_advisory_xact_lock($1) as locked;
