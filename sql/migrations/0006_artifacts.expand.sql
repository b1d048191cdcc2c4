-- Files of conversations. No release wrote to the tables of 0004; these ones know whose a file is.
drop table artifacts;
drop table artifact_chunks;
drop table artifact_blobs;

create table artifact_blobs (
  org_id       uuid not null references orgs,
  digest       bytea not null,
  size         bigint not null,
  chunk_bytes  integer not null,
  place        text not null default 'postgres' check (place in ('postgres', 'object_store')),
  referenced   boolean not null default false,
  touched_at   timestamptz not null default statement_timestamp(),
  primary key (org_id, digest)
);
create index artifact_blobs_unreferenced on artifact_blobs (touched_at) where not referenced;
comment on table artifact_blobs is 'Contents by SHA-256, once per organization: one never learns what another one has.';

create table artifact_chunks (
  org_id   uuid not null,
  digest   bytea not null,
  ordinal  integer not null,
  data     bytea not null,
  primary key (org_id, digest, ordinal),
  foreign key (org_id, digest) references artifact_blobs on delete cascade
);
-- Pictures do not compress, and a part of an uncompressed value is read without the rest.
alter table artifact_chunks alter column data set storage external;

create table artifacts (
  agent_id    uuid not null references agents,
  id          uuid not null,
  org_id      uuid not null,
  digest      bytea not null,
  size        bigint not null,
  media_type  text not null,
  filename    text,
  width       integer,
  height      integer,
  created_at  timestamptz not null default statement_timestamp(),
  primary key (agent_id, id),
  foreign key (org_id, digest) references artifact_blobs
);
comment on table artifacts is 'Files that inputs and results refer to; written with them, and never changed.';
