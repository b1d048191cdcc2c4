-- Secrets (envelope-encrypted) and the model catalogue: provider config -> configured model -> revision -> project grant.
create table secrets (
  id                uuid primary key,
  org_id            uuid not null references orgs,
  owner_kind        text not null check (owner_kind in ('org', 'project', 'user', 'system')),
  owner_project_id  uuid references projects,
  owner_user_id     uuid references users,
  name              text not null,
  kind              text not null check (kind in ('generic', 'oauth_token_set', 'aws_credentials', 'slack_app_credentials')),
  description       text not null default '',
  metadata          jsonb not null default '{}',
  current_version   integer not null default 1,
  created_at        timestamptz not null default statement_timestamp(),
  updated_at        timestamptz not null default statement_timestamp(),
  deleted_at        timestamptz
);
create unique index secrets_name on secrets
  (org_id, owner_kind, coalesce(owner_project_id, owner_user_id, org_id), name) where deleted_at is null;

create table secret_versions (
  secret_id     uuid not null references secrets,
  version       integer not null,
  key_id        text not null,
  wrapped_key   bytea not null,
  nonce         bytea not null,
  ciphertext    bytea not null,
  payload_keys  text[] not null default '{}',
  created_at    timestamptz not null default statement_timestamp(),
  primary key (secret_id, version)
);
comment on table secret_versions is 'AES-256-GCM: a data key per version, wrapped by the ring key key_id. Plaintext is never stored.';

create table secret_grants (
  id          uuid primary key,
  secret_id   uuid not null references secrets,
  project_id  uuid not null references projects,
  created_at  timestamptz not null default statement_timestamp(),
  unique (secret_id, project_id)
);

create table model_provider_configs (
  id                  uuid primary key,
  org_id              uuid not null references orgs,
  name                text not null,
  preset              text,
  api_format          text not null check (api_format in ('anthropic_messages', 'openai_chat_completions', 'openai_responses')),
  api_variant         text not null default 'default',
  base_url            text not null,
  request_path        text not null,
  auth_kind           text not null,
  secret_id           uuid references secrets,
  request_timeout_ms  integer not null default 600000,
  origin              text not null default 'api' check (origin in ('api', 'environment')),
  created_at          timestamptz not null default statement_timestamp(),
  updated_at          timestamptz not null default statement_timestamp(),
  deleted_at          timestamptz
);
create unique index model_provider_configs_name on model_provider_configs (org_id, name) where deleted_at is null;

create table configured_models (
  id                   uuid primary key,
  org_id               uuid not null references orgs,
  provider_config_id   uuid not null references model_provider_configs,
  name                 text not null,
  current_revision_id  uuid not null,
  created_at           timestamptz not null default statement_timestamp(),
  updated_at           timestamptz not null default statement_timestamp(),
  deleted_at           timestamptz
);
create unique index configured_models_name on configured_models (provider_config_id, name) where deleted_at is null;

create table configured_model_revisions (
  id                         uuid primary key,
  configured_model_id        uuid not null references configured_models,
  revision                   integer not null,
  provider_model_slug        text not null,
  context_window_tokens      integer not null,
  max_output_tokens          integer not null,
  default_max_output_tokens  integer,
  default_cache_retention    text not null default 'short' check (default_cache_retention in ('none', 'short', 'long')),
  supports_tools             boolean not null default true,
  supports_reasoning         boolean not null default false,
  default_reasoning_effort   text not null default '',
  supported_reasoning_efforts text[] not null default '{}',
  input_modalities           text[] not null default '{text}',
  output_modalities          text[] not null default '{text}',
  created_at                 timestamptz not null default statement_timestamp(),
  unique (configured_model_id, revision),
  check (context_window_tokens > max_output_tokens)
);

create table project_model_grants (
  id                         uuid primary key,
  project_id                 uuid not null references projects,
  configured_model_id        uuid not null references configured_models,
  context_window_tokens      integer,
  max_output_tokens          integer,
  default_max_output_tokens  integer,
  default_cache_retention    text,
  default_reasoning_effort   text,
  created_at                 timestamptz not null default statement_timestamp(),
  updated_at                 timestamptz not null default statement_timestamp(),
  unique (project_id, configured_model_id)
);
