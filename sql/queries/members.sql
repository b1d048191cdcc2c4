-- name: list_members
-- The members of an organization. Index: org_members_pkey.
select l.* from (
  select case $1::text when 'name' then u.display_name
              else to_char(m.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         u.id, coalesce(u.email, '') as email, u.display_name as name, m.role, m.created_at
  from org_members m join users u on u.id = m.user_id and u.deleted_at is null
  where m.org_id = $7) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: owners
-- Lock the owners of an organization, so that two requests cannot take the last two. Index: org_members_pkey.
select user_id from org_members where org_id = $1 and role = 'owner' order by user_id for update;

-- name: set_role
-- Change a member's role in an organization. Index: org_members_pkey.
update org_members set role = $3 where org_id = $1 and user_id = $2 returning org_id, user_id, role, created_at;

-- name: drop_project_roles
-- Take a member's roles in all projects of an organization. Index: project_members_user.
delete from project_members m using projects p where p.id = m.project_id and p.org_id = $1 and m.user_id = $2;

-- name: drop_member
-- End a membership. Index: org_members_pkey.
delete from org_members where org_id = $1 and user_id = $2;

-- name: user_projects
-- A member's roles in an organization's projects, by project name. Index: project_members_user.
select p.id, p.name, m.role, m.created_at
from project_members m join projects p on p.id = m.project_id and p.deleted_at is null
where p.org_id = $1 and m.user_id = $2 order by p.name, p.id;

-- name: key_projects
-- A key's roles in its organization's projects, by project name. Index: org_api_key_projects_pkey.
select p.id, p.name, m.role, m.created_at
from org_api_key_projects m join projects p on p.id = m.project_id and p.deleted_at is null
where p.org_id = $1 and m.key_id = $2 order by p.name, p.id;

-- name: drop_project_role
-- Take a member's role in a project. Index: project_members_pkey.
delete from project_members where project_id = $1 and user_id = $2 returning role;

-- name: drop_key_project_role
-- Take a key's role in a project. Index: org_api_key_projects_pkey.
delete from org_api_key_projects where project_id = $1 and key_id = $2 returning role;

-- name: list_keys
-- The keys of an organization, revoked ones too, newest first, after a (time, id) key. Index: org_api_keys_newest.
-- Who made a key was not always kept: then it is the organization's first owner.
select k.id, k.org_id, k.name, k.token_id, coalesce(k.org_role, '') as org_role,
       coalesce(k.created_by_user_id, (select m.user_id from org_members m where m.org_id = k.org_id and m.role = 'owner'
                                       order by m.created_at, m.user_id limit 1)) as created_by_user_id,
       k.created_at, k.updated_at, k.last_used_at, k.revoked_at
from org_api_keys k
where k.org_id = $1 and ($5::uuid is null or k.id = $5)
  and ($2::timestamptz is null or (k.created_at, k.id) < ($2, $3::uuid))
order by k.created_at desc, k.id desc limit $4;

-- name: add_key
-- A new key, by the hash of its text; no row when its name is taken (waits for the other transaction first).
-- Index: org_api_keys_name.
insert into org_api_keys (id, org_id, name, org_role, token_id, token_hash, created_by_user_id)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (org_id, name) where revoked_at is null do nothing returning id;

-- name: lock_key
-- Lock a key against parallel changes. Index: org_api_keys_pkey.
select revoked_at is not null as revoked from org_api_keys where org_id = $1 and id = $2 for update;

-- name: change_key
-- Rename a locked key or change its role; what is null stays. Index: org_api_keys_pkey.
update org_api_keys set name = coalesce($2, name), org_role = coalesce($3, org_role), updated_at = statement_timestamp()
where id = $1;

-- name: revoke_key
-- Make a locked key worthless for good; the first time stays. Index: org_api_keys_pkey.
update org_api_keys set revoked_at = statement_timestamp(), org_role = null, updated_at = statement_timestamp()
where id = $1 and revoked_at is null;

-- name: list_tokens
-- A user's personal tokens, revoked ones too, newest first, after a (time, id) key. Index: personal_access_tokens_user.
select id, user_id, name, token_id, created_at, last_used_at, revoked_at
from personal_access_tokens
where user_id = $1 and ($2::timestamptz is null or (created_at, id) < ($2, $3::uuid))
order by created_at desc, id desc limit $4;

-- name: count_tokens
-- How many of a user's tokens work. Index: personal_access_tokens_user.
select count(*)::integer from personal_access_tokens where user_id = $1 and revoked_at is null;

-- name: revoke_token
-- Make a user's token worthless for good; the first time stays. Index: personal_access_tokens_pkey.
update personal_access_tokens set revoked_at = coalesce(revoked_at, statement_timestamp())
where user_id = $1 and id = $2
returning id, user_id, name, token_id, created_at, last_used_at, revoked_at;

-- name: revoke_user_tokens
-- Make every token of a user worthless. Index: personal_access_tokens_user.
update personal_access_tokens set revoked_at = statement_timestamp() where user_id = $1 and revoked_at is null;

-- name: drop_user_secret_grants
-- Take a user's own secrets from every project.
delete from secret_grants g using secrets s where s.owner_user_id = $1 and g.secret_id = s.id;

-- name: destroy_user_secrets
-- Destroy the values of a user's own secrets for good. Index: secret_versions_pkey.
delete from secret_versions v using secrets s where s.owner_user_id = $1 and v.secret_id = s.id;

-- name: mark_user_secrets_deleted
-- Hide a user's own secrets.
update secrets set deleted_at = statement_timestamp() where owner_user_id = $1 and deleted_at is null;

-- name: erase_user
-- Forget who a user was; the row stays for what it is named in. Index: users_pkey.
update users set deleted_at = statement_timestamp(), updated_at = statement_timestamp(), email = null, display_name = ''
where id = $1;
