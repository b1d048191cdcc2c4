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
