-- Machines: where they come from, who may use them, what runs on them.
create table machine_pools (
  id                            uuid primary key,
  org_id                        uuid not null references orgs,
  name                          text not null,
  description                   text not null default '',
  management_kind               text not null default 'tenant' check (management_kind in ('tenant', 'cluster')),
  provider                      text not null,
  provider_config               jsonb not null default '{}',
  provider_auth_secret_id       uuid references secrets,
  default_machine_cpu           integer check (default_machine_cpu > 0),
  default_machine_memory_mb     integer check (default_machine_memory_mb > 0),
  default_machine_env           jsonb not null default '{}',
  default_machine_secret_env    jsonb not null default '{}',
  default_machine_provider_options jsonb not null default '{}',
  default_cwd                   text not null default '',
  runtime_protection_enabled    boolean not null default false,
  max_total_machines            integer not null check (max_total_machines >= 0),
  max_total_cpu                 integer,
  max_total_memory_mb           integer,
  min_machine_cpu               integer,
  min_machine_memory_mb         integer,
  max_machine_cpu               integer,
  max_machine_memory_mb         integer,
  delete_after_idle_minutes     integer check (delete_after_idle_minutes >= 5),
  metadata                      jsonb not null default '{}',
  idempotency_key               text,
  created_at                    timestamptz not null default statement_timestamp(),
  updated_at                    timestamptz not null default statement_timestamp(),
  deleted_at                    timestamptz
);
create unique index machine_pools_name on machine_pools (org_id, name) where deleted_at is null;
create unique index machine_pools_key on machine_pools (org_id, idempotency_key) where idempotency_key is not null;
create index machine_pools_newest on machine_pools (org_id, created_at desc, id desc) where deleted_at is null;

create table machine_pool_grants (
  id                            uuid primary key,
  org_id                        uuid not null references orgs,
  project_id                    uuid not null references projects,
  pool_id                       uuid not null references machine_pools,
  description                   text not null default '',
  default_machine_cpu           integer check (default_machine_cpu > 0),
  default_machine_memory_mb     integer check (default_machine_memory_mb > 0),
  default_machine_env_overlay   jsonb not null default '{}',
  default_machine_secret_env_overlay jsonb not null default '{}',
  default_machine_provider_options_overlay jsonb not null default '{}',
  default_cwd                   text not null default '',
  max_total_machines            integer,
  max_total_cpu                 integer,
  max_total_memory_mb           integer,
  min_machine_cpu               integer,
  min_machine_memory_mb         integer,
  max_machine_cpu               integer,
  max_machine_memory_mb         integer,
  delete_after_idle_minutes     integer check (delete_after_idle_minutes = 0 or delete_after_idle_minutes >= 5),
  metadata                      jsonb not null default '{}',
  idempotency_key               text,
  created_at                    timestamptz not null default statement_timestamp(),
  updated_at                    timestamptz not null default statement_timestamp(),
  deleted_at                    timestamptz
);
create unique index machine_pool_grants_pool on machine_pool_grants (project_id, pool_id) where deleted_at is null;
create unique index machine_pool_grants_key on machine_pool_grants (project_id, idempotency_key)
  where idempotency_key is not null;
create index machine_pool_grants_of_pool on machine_pool_grants (pool_id) where deleted_at is null;

create table machines (
  id                     uuid primary key,
  org_id                 uuid not null references orgs,
  source_kind            text not null check (source_kind in ('byo', 'pool')),
  pool_id                uuid references machine_pools,
  pool_grant_id          uuid references machine_pool_grants,
  project_id             uuid references projects,
  display_name           text not null,
  description            text not null default '',
  provider               text not null default 'byo',
  cwd                    text not null default '',
  env                    jsonb not null default '{}',
  secret_env             jsonb not null default '{}',
  metadata               jsonb not null default '{}',
  observed_platform      text,
  -- what a pool machine was admitted with; resolved once, when its row is made
  cpu                    integer,
  memory_mb              integer,
  provider_options       jsonb not null default '{}',
  delete_after_idle_minutes integer,
  lifecycle_state        text not null default 'active' check (lifecycle_state in
                         ('provisioning', 'provision_failed', 'active', 'deleting', 'delete_failed', 'deleted')),
  lifecycle_version      bigint not null default 1,
  lifecycle_reason_code  text not null default '',
  lifecycle_reason_message text not null default '',
  provision_attempts     integer not null default 0,
  delete_attempts        integer not null default 0,
  next_reconcile_after   timestamptz,
  -- the provider's resource; generation is the fence of containers: one more for each that is made
  resource_id            text,
  resource_host          text,
  generation             integer not null default 0,
  sandbox_url            text,
  -- who provisions, deletes or drives it at this moment
  worker_id              uuid,
  claim_token            bigint,
  claimed_until          timestamptz,
  -- the daemon
  current_runtime_id     uuid,
  asleep_since           timestamptz,
  wake_until             timestamptz,
  wake_attempts          integer not null default 0,
  last_observed_at       timestamptz,
  last_activity_at       timestamptz not null default statement_timestamp(),
  activated_at           timestamptz,
  failure_report         jsonb,
  idempotency_key        text,
  created_at             timestamptz not null default statement_timestamp(),
  updated_at             timestamptz not null default statement_timestamp(),
  deleted_at             timestamptz,
  check ((source_kind = 'pool') = (pool_id is not null)),
  check ((worker_id is null) = (claim_token is null)),
  check ((lifecycle_state = 'deleted') = (deleted_at is not null))
) with (fillfactor = 70);
create unique index machines_key on machines (org_id, idempotency_key) where idempotency_key is not null;
create index machines_newest on machines (org_id, created_at desc, id desc) where deleted_at is null;
create index machines_pool on machines (pool_id, lifecycle_state) where pool_id is not null and deleted_at is null;
create index machines_due on machines (next_reconcile_after, id)
  where lifecycle_state in ('provisioning', 'provision_failed', 'deleting', 'delete_failed');
create index machines_driven on machines (worker_id) where worker_id is not null;
create index machines_to_drive on machines (id)
  where lifecycle_state = 'active' and source_kind = 'pool' and worker_id is null;
comment on column machines.generation is 'Containers made for this machine so far; part of the container''s name, which the engine keeps unique.';
comment on column machines.resource_host is 'Where the resource lives, when not every replica reaches it: a host id or an engine endpoint.';
comment on column machines.last_activity_at is 'Last start or end of a process or action: idle deletion counts from here or from activation.';

create table machine_grants (
  id             uuid primary key,
  org_id         uuid not null references orgs,
  project_id     uuid not null references projects,
  machine_id     uuid not null references machines,
  pool_grant_id  uuid references machine_pool_grants,
  source_kind    text not null check (source_kind in ('explicit', 'pool')),
  description    text not null default '',
  metadata       jsonb not null default '{}',
  idempotency_key text,
  created_at     timestamptz not null default statement_timestamp(),
  updated_at     timestamptz not null default statement_timestamp(),
  deleted_at     timestamptz
);
create unique index machine_grants_machine on machine_grants (project_id, machine_id) where deleted_at is null;
create unique index machine_grants_key on machine_grants (project_id, idempotency_key) where idempotency_key is not null;
create index machine_grants_of_machine on machine_grants (machine_id) where deleted_at is null;

create table agent_machine_bindings (
  id                  uuid primary key,
  org_id              uuid not null references orgs,
  project_id          uuid not null references projects,
  agent_id            uuid not null references agents,
  machine_id          uuid not null references machines,
  machine_ref         text not null,
  binding_kind        text not null check (binding_kind in ('explicit', 'pool')),
  source_key          text not null default '',
  state               text not null default 'attached' check (state in ('attached', 'released')),
  description         text not null default '',
  cwd                 text not null default '',
  env_overlay         jsonb not null default '{}',
  secret_env_overlay  jsonb not null default '{}',
  created_at          timestamptz not null default statement_timestamp(),
  updated_at          timestamptz not null default statement_timestamp()
);
create unique index agent_machine_bindings_attached on agent_machine_bindings (agent_id, machine_id)
  where state = 'attached';
create unique index agent_machine_bindings_pool on agent_machine_bindings (machine_id)
  where state = 'attached' and binding_kind = 'pool';
create unique index agent_machine_bindings_ref on agent_machine_bindings (agent_id, machine_ref);
create index agent_machine_bindings_of_machine on agent_machine_bindings (machine_id) where state = 'attached';
comment on column agent_machine_bindings.source_key is 'Which entry of the config''s machine_sources it came from; empty when a tool made it.';

create table machine_daemon_tokens (
  id             uuid primary key,
  org_id         uuid not null references orgs,
  machine_id     uuid not null references machines,
  name           text not null default '',
  metadata       jsonb not null default '{}',
  token_hash     text not null unique,
  created_at     timestamptz not null default statement_timestamp(),
  last_used_at   timestamptz,
  revoked_at     timestamptz,
  revoke_reason  text not null default ''
);
create index machine_daemon_tokens_machine on machine_daemon_tokens (machine_id, created_at desc, id desc);

create table machine_runtimes (
  id                    uuid primary key,
  org_id                uuid not null references orgs,
  machine_id            uuid not null references machines,
  token_id              uuid references machine_daemon_tokens,
  daemon_instance_id    uuid not null,
  daemon_version        text not null,
  capacity              jsonb not null default '{}',
  state                 text not null default 'active' check (state in ('active', 'ended')),
  state_reason_code     text not null default '',
  state_reason_message  text not null default '',
  session_id            uuid,
  worker_id             uuid,
  connected_at          timestamptz,
  disconnected_at       timestamptz,
  created_at            timestamptz not null default statement_timestamp(),
  last_seen_at          timestamptz not null default statement_timestamp(),
  lease_expires_at      timestamptz not null,
  ended_at              timestamptz,
  unique (machine_id, daemon_instance_id),
  check ((state = 'ended') = (ended_at is not null))
) with (fillfactor = 60);
create unique index machine_runtimes_active on machine_runtimes (machine_id) where state = 'active';
create index machine_runtimes_lease on machine_runtimes (lease_expires_at) where state = 'active';
comment on column machine_runtimes.session_id is 'The one live command channel; every statement of a channel names it, so an older one changes nothing.';
comment on column machine_runtimes.disconnected_at is 'When the channel was lost; null while it is up. Offline begins here or at lease_expires_at, whichever is first.';

create table processes (
  id                    uuid primary key,
  agent_id              uuid not null,
  project_id            uuid not null,
  machine_id            uuid not null references machines,
  binding_id            uuid not null references agent_machine_bindings,
  tool_call_id          uuid,
  purpose               text not null default 'command' check (purpose in ('command', 'upload', 'download')),
  command               text not null,
  shell                 text not null default 'default',
  io_mode               text not null default 'pipe' check (io_mode in ('pipe', 'pty')),
  cwd                   text not null default '',
  env                   jsonb not null default '{}',
  secret_env            jsonb not null default '{}',
  wait_ms               integer not null default 10000,
  timeout_seconds       integer not null default 0,
  state                 text not null default 'queued' check (state in
                        ('queued', 'starting', 'running', 'exited', 'failed', 'killed', 'unknown')),
  reason_code           text not null default '',
  reason_message        text not null default '',
  exit_code             integer,
  exit_signal           text,
  runtime_id            uuid,
  terminate_requested   text,
  default_cursor        bigint not null default 0,
  next_action_seq       bigint not null default 1,
  created_at            timestamptz not null default statement_timestamp(),
  granted_at            timestamptz,
  started_at            timestamptz,
  ended_at              timestamptz,
  closed_at             timestamptz,
  unique (agent_id, tool_call_id),
  check (state <> 'exited' or exit_code is not null),
  check (state not in ('killed', 'unknown') or exit_code is null),
  check ((state in ('exited', 'failed', 'killed', 'unknown')) = (closed_at is not null))
) with (fillfactor = 70);
create index processes_queued on processes (machine_id, created_at, id) where state = 'queued';
create index processes_live on processes (machine_id) where state in ('queued', 'starting', 'running');
create index processes_agent on processes (agent_id, created_at desc, id desc);
create index processes_agent_live on processes (agent_id) where state in ('queued', 'starting', 'running');
comment on table processes is 'A command on a machine. No foreign key to the log: sql/checks stand in.';
comment on column processes.terminate_requested is 'Why the server wants it ended; sent again at each heartbeat until the process is closed.';
comment on column processes.closed_at is 'When the row reached its last state, by the database''s clock (ended_at is the machine''s).';

create table process_actions (
  id              uuid primary key,
  agent_id        uuid not null,
  process_id      uuid not null references processes,
  machine_id      uuid not null,
  tool_call_id    uuid,
  seq             bigint not null,
  kind            text not null check (kind in ('read', 'write', 'interrupt', 'terminate')),
  payload         json not null,
  state           text not null default 'queued' check (state in ('queued', 'accepted', 'applied', 'failed', 'unknown')),
  reason_code     text not null default '',
  result          json,
  created_at      timestamptz not null default statement_timestamp(),
  accepted_at     timestamptz,
  closed_at       timestamptz,
  unique (process_id, seq),
  unique (agent_id, tool_call_id),
  check ((state in ('applied', 'failed', 'unknown')) = (closed_at is not null))
) with (fillfactor = 70);
create index process_actions_open on process_actions (machine_id, created_at, id) where state in ('queued', 'accepted');

create view sandboxes as
select b.agent_id, m.id as machine_id, m.resource_id as container_id, m.metadata ->> 'ip_address' as ip_address,
       case when m.lifecycle_state <> 'active' then m.lifecycle_state
            when m.asleep_since is not null then 'asleep'
            else 'running' end as state,
       m.created_at, m.activated_at as running_at, m.deleted_at as stopped_at
from machines m
join agent_machine_bindings b on b.machine_id = m.id and b.binding_kind = 'pool';
comment on view sandboxes is 'Pool machines as an analyst expects them: one row per container and the agent that has it.';

create view machine_connections as
select m.id as machine_id, c.state,
       case when c.state = 'online' then ''
            when m.lifecycle_state <> 'active' then m.lifecycle_state
            when c.state = 'asleep' then 'asleep'
            when r.id is null then 'never_connected'
            when t.revoked_at is not null then 'authorization_revoked'
            when r.state = 'ended' then coalesce(nullif(r.state_reason_code, ''), 'ended')
            when r.connected_at is null then 'not_connected'
            when r.disconnected_at is not null then 'disconnected'
            else 'lease_expired' end as reason
from machines m
left join machine_runtimes r on r.id = m.current_runtime_id
left join machine_daemon_tokens t on t.id = r.token_id
cross join lateral (
  select case when m.lifecycle_state = 'active' and r.state = 'active' and t.revoked_at is null
                   and r.connected_at is not null and r.disconnected_at is null
                   and r.lease_expires_at > statement_timestamp() then 'online'
              when m.lifecycle_state = 'active' and m.asleep_since is not null then 'asleep'
              else 'offline' end as state) c;
comment on view machine_connections is 'Whether a machine can take commands at this moment, and if not, why: the one definition of online.';
