-- The durable engine: configs, agents, the hot row, the log, and what an event points at.
create table agent_configs (
  id                   uuid primary key,
  org_id               uuid not null references orgs,
  project_id           uuid not null references projects,
  source               text not null,
  source_format        text not null check (source_format in ('yaml', 'json')),
  source_hash          text not null,
  definition           json not null,
  definition_hash      text not null,
  instruction_hash     text not null,
  configured_model_id  uuid not null references configured_models,
  created_at           timestamptz not null default statement_timestamp(),
  unique (project_id, definition_hash, source_format, source_hash)
);
comment on table agent_configs is 'Immutable compiled configs, deduplicated by meaning and source text.';

create table agents (
  id                 uuid primary key,
  org_id             uuid not null references orgs,
  project_id         uuid not null references projects,
  name               text not null,
  current_config_id  uuid not null references agent_configs,
  idempotency_key    text,
  created_at         timestamptz not null default statement_timestamp(),
  updated_at         timestamptz not null default statement_timestamp(),
  archived_at        timestamptz,
  unique (project_id, idempotency_key)
);
create index agents_newest on agents (project_id, created_at desc, id desc) where archived_at is null;

-- One narrow row per agent: the scheduler's whole world, the fence and the sequence counter.
create table agent_sched (
  agent_id         uuid primary key,
  project_id       uuid not null,
  gate             text not null default 'open' check (gate in ('open', 'paused', 'crashed', 'archived')),
  worker_id        uuid,
  claim_token      bigint,
  epoch            bigint not null default 0,
  ready_at         timestamptz,
  next_sequence    bigint not null default 1,
  inputs_gen       bigint not null default 0,
  next_rank        bigint not null default 1024,
  turn_id          uuid,
  turn_sequence    bigint not null default 0,
  turn_open        boolean not null default false,
  batch_sequence   bigint,
  open_calls       integer not null default 0,
  attempt          integer not null default 0,
  retry_at         timestamptz,
  step_number      bigint not null default 0,
  deaths           smallint not null default 0,
  history_version  integer not null default 0,
  void             int8multirange not null default '{}',
  config_id        uuid not null,
  check ((worker_id is null) = (claim_token is null)),
  check (open_calls >= 0)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);
create index agent_sched_ready on agent_sched (ready_at, agent_id)
  where worker_id is null and gate = 'open' and ready_at is not null;
create index agent_sched_worker on agent_sched (worker_id) where worker_id is not null;
comment on column agent_sched.inputs_gen is 'Moved by every writer other than the claim holder; a save begins the next step only if it has not moved.';
comment on column agent_sched.turn_open is 'The current turn wants another model call once its open calls are answered.';
comment on column agent_sched.batch_sequence is 'Sequence of the model output whose calls are open; null when none is.';
comment on column agent_sched.attempt is 'Failed attempts of the pending model operation; releases and deaths do not count.';
comment on column agent_sched.deaths is 'Worker deaths in a row without a saved step.';
comment on column agent_sched.void is 'Sequences that the fold skips: damaged rows stay where they are.';

create table workers (
  id                uuid primary key,
  lock_key          bigint not null unique,
  state             text not null default 'live' check (state in ('live', 'stopped', 'dead', 'lapsed')),
  roles             text[] not null,
  version           text not null,
  started_at        timestamptz not null default clock_timestamp(),
  attached_at       timestamptz not null default clock_timestamp(),
  lease_expires_at  timestamptz not null,
  ended_at          timestamptz
);
create index workers_live on workers (state) where state = 'live';

create table events (
  agent_id       uuid not null,
  sequence       bigint not null,
  id             uuid not null,
  kind           text not null check (kind in ('agent_input', 'model_output', 'tool_result', 'context_checkpoint')),
  turn_id        uuid not null,
  turn_sequence  bigint not null,
  is_opening     boolean not null default false,
  is_semantic    boolean not null default false,
  payload        json not null,
  meta           json,
  replay         bytea,
  created_at     timestamptz not null default statement_timestamp(),
  primary key (agent_id, sequence)
);
comment on table events is 'Append-only and gapless per agent. No foreign keys: sql/checks stand in.';
comment on column events.payload is 'The kind-specific fields exactly as the public contract shows them (json keeps the bytes).';
comment on column events.meta is 'What only the engine reads: frontier, model and revision of an output.';
comment on column events.replay is 'Provider content that must go back byte for byte (signed thinking, item ids).';

create table turns (
  agent_id        uuid not null,
  turn_sequence   bigint not null,
  id              uuid not null,
  first_sequence  bigint not null,
  started_at      timestamptz not null default statement_timestamp(),
  primary key (agent_id, turn_sequence),
  unique (agent_id, id)
);
comment on table turns is 'A turn is a contiguous run of sequences: it ends before the first_sequence of the next one.';

create table steps (
  agent_id       uuid not null,
  number         bigint not null,
  kind           text not null check (kind in ('model', 'tools', 'compaction')),
  attempt        integer not null,
  frontier       bigint not null,
  call_id        uuid,
  turn_id        uuid not null,
  config_id      uuid not null,
  revision_id    uuid,
  worker_id      uuid not null,
  epoch          bigint not null,
  state          text not null default 'started'
                 check (state in ('started', 'succeeded', 'failed', 'canceled', 'released', 'interrupted')),
  retry_at       timestamptz,
  started_at     timestamptz not null default statement_timestamp(),
  finished_at    timestamptz,
  usage          json,
  error          json,
  next_action    text,
  output_sequence bigint,
  secrets_used   text[] not null default '{}',
  primary key (agent_id, number)
) with (fillfactor = 80);
comment on column steps.call_id is 'Public model call id (mcc_) of a model step.';
comment on column steps.output_sequence is 'Model step: the output event that it saved. Tools step: the output whose calls it runs.';

create table tool_calls (
  agent_id          uuid not null,
  output_sequence   bigint not null,
  ordinal           integer not null,
  id                uuid not null,
  turn_id           uuid not null,
  turn_sequence     bigint not null,
  provider_call_id  text not null,
  name              text not null,
  type              text not null check (type in ('built_in', 'custom', 'mcp')),
  input             json not null,
  state             text not null check (state in
                    ('awaiting_authorization', 'awaiting_permission', 'ready', 'running', 'waiting', 'completed')),
  outcome           text check (outcome in ('succeeded', 'failed', 'denied', 'canceled')),
  step_number       bigint,
  result_sequence   bigint,
  created_at        timestamptz not null default statement_timestamp(),
  started_at        timestamptz,
  completed_at      timestamptz,
  primary key (agent_id, output_sequence, ordinal),
  unique (agent_id, id),
  check ((state = 'completed') = (outcome is not null)),
  check ((state = 'completed') = (result_sequence is not null))
) with (fillfactor = 70);

create table interactions (
  agent_id              uuid not null references agents,
  id                    uuid not null,
  tool_call_id          uuid not null,
  kind                  text not null check (kind in ('permission', 'question')),
  state                 text not null default 'open' check (state in ('open', 'resolved', 'canceled')),
  request               json not null,
  resolution            json,
  resolved_by_input_id  uuid,
  resolved_by           text,
  reason                text,
  created_at            timestamptz not null default statement_timestamp(),
  resolved_at           timestamptz,
  primary key (agent_id, id),
  unique (agent_id, tool_call_id, kind)
);
comment on column interactions.resolved_by is 'Principal that answered: the same answers by the same person are a replay.';

create table inputs (
  agent_id         uuid not null references agents,
  id               uuid not null,
  kind             text not null check (kind in ('content', 'control', 'interaction_response', 'config_change')),
  delivery_mode    text not null check (delivery_mode in ('queued', 'steering', 'immediate')),
  state            text not null check (state in ('received', 'resolved', 'canceled', 'rejected')),
  rank             bigint not null check (rank > 0),
  content          json not null default '[]',
  metadata         json,
  actor_id         uuid references actors,
  control_type     text,
  interaction_id   uuid,
  config_id        uuid,
  idempotency_key  text,
  event_sequence   bigint,
  queued_at        timestamptz not null default statement_timestamp(),
  resolved_at      timestamptz,
  primary key (agent_id, id),
  check ((state = 'resolved') = (event_sequence is not null))
);
create unique index inputs_key on inputs (agent_id, idempotency_key) where idempotency_key is not null;
create index inputs_waiting on inputs (agent_id, delivery_mode, rank, id) where state = 'received';
