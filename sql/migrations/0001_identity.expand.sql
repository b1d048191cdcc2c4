-- Who may call, and what belongs to whom. Ids are UUIDv7, made by the application.
create table installation (
  name        text primary key,
  value       text not null,
  created_at  timestamptz not null default statement_timestamp()
);
comment on table installation is 'Facts of this database as a whole: installation id, key check value.';

create table orgs (
  id              uuid primary key,
  name            text not null,
  created_at      timestamptz not null default statement_timestamp(),
  updated_at      timestamptz not null default statement_timestamp(),
  deleted_at      timestamptz
);

create table users (
  id            uuid primary key,
  email         text,
  display_name  text not null default '',
  created_at    timestamptz not null default statement_timestamp(),
  updated_at    timestamptz not null default statement_timestamp(),
  deleted_at    timestamptz
);
create unique index users_email on users (lower(email)) where email is not null and deleted_at is null;

create table org_members (
  org_id      uuid not null references orgs,
  user_id     uuid not null references users,
  role        text not null check (role in ('owner', 'admin', 'member')),
  created_at  timestamptz not null default statement_timestamp(),
  primary key (org_id, user_id)
);
create index org_members_user on org_members (user_id);

create table projects (
  id               uuid primary key,
  org_id           uuid not null references orgs,
  name             text not null,
  idempotency_key  text,
  created_at       timestamptz not null default statement_timestamp(),
  updated_at       timestamptz not null default statement_timestamp(),
  deleted_at       timestamptz
);
create unique index projects_key on projects (org_id, idempotency_key) where idempotency_key is not null;
create index projects_newest on projects (org_id, created_at desc, id desc) where deleted_at is null;

create table project_members (
  project_id  uuid not null references projects,
  user_id     uuid not null references users,
  role        text not null check (role in ('admin', 'developer', 'operator', 'viewer')),
  created_at  timestamptz not null default statement_timestamp(),
  primary key (project_id, user_id)
);
create index project_members_user on project_members (user_id);

create table personal_access_tokens (
  id            uuid primary key,
  user_id       uuid not null references users,
  name          text not null,
  token_id      text not null unique,
  token_hash    text not null unique,
  created_at    timestamptz not null default statement_timestamp(),
  last_used_at  timestamptz,
  revoked_at    timestamptz
);
create index personal_access_tokens_user on personal_access_tokens (user_id, created_at desc, id desc);
comment on column personal_access_tokens.token_hash is 'Hex SHA-256 of the whole token; the token itself is never stored.';

create table org_api_keys (
  id            uuid primary key,
  org_id        uuid not null references orgs,
  name          text not null,
  org_role      text check (org_role in ('admin', 'member')),
  token_id      text not null unique,
  token_hash    text not null unique,
  created_at    timestamptz not null default statement_timestamp(),
  updated_at    timestamptz not null default statement_timestamp(),
  last_used_at  timestamptz,
  revoked_at    timestamptz
);
create unique index org_api_keys_name on org_api_keys (org_id, name) where revoked_at is null;

create table org_api_key_projects (
  key_id      uuid not null references org_api_keys,
  project_id  uuid not null references projects,
  role        text not null check (role in ('admin', 'developer', 'operator', 'viewer')),
  created_at  timestamptz not null default statement_timestamp(),
  primary key (key_id, project_id)
);

create table actors (
  id                  uuid primary key,
  org_id              uuid not null references orgs,
  project_id          uuid not null references projects,
  provider            text not null check (provider in ('omnara', 'slack', 'external')),
  provider_tenant_id  text not null default '',
  provider_user_id    text not null,
  display_name        text,
  metadata            jsonb not null default '{}',
  created_at          timestamptz not null default statement_timestamp(),
  updated_at          timestamptz not null default statement_timestamp(),
  unique (project_id, provider, provider_tenant_id, provider_user_id)
);
