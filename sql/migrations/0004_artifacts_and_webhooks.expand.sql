-- Room for what follows: media in Postgres, and the outbox of event webhooks.
create table artifact_blobs (
  digest      bytea primary key,
  size        bigint not null,
  created_at  timestamptz not null default statement_timestamp()
);

create table artifact_chunks (
  digest   bytea not null references artifact_blobs,
  ordinal  integer not null,
  data     bytea not null,
  primary key (digest, ordinal)
);

create table artifacts (
  agent_id    uuid not null references agents,
  id          uuid not null,
  digest      bytea not null references artifact_blobs,
  media_type  text not null,
  filename    text,
  created_at  timestamptz not null default statement_timestamp(),
  primary key (agent_id, id)
);

create table webhook_deliveries (
  agent_id         uuid not null,
  id               uuid not null,
  event_sequence   bigint not null,
  url              text not null,
  attempt          integer not null default 0,
  next_attempt_at  timestamptz,
  delivered_at     timestamptz,
  failed_at        timestamptz,
  last_error       text,
  created_at       timestamptz not null default statement_timestamp(),
  primary key (agent_id, id)
);
create index webhook_deliveries_due on webhook_deliveries (next_attempt_at, agent_id, id)
  where next_attempt_at is not null;
