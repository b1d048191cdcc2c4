-- no-transaction
-- What the flat view of an agent adds up. Kept by whoever looks, never by a step: the sum up to a step, so that a look
-- adds up only what came after it. A missing row costs one long look and nothing else.
create table if not exists agent_usage (
  agent_id  uuid primary key,
  through   bigint not null,
  sums      json not null
);
comment on table agent_usage is 'Tokens of all steps up to `through`; the steps after it are added by the reader.';

-- A deleted project is hidden at once, and its agents are archived afterwards, some at a time.
alter table projects add column if not exists emptying boolean not null default false;
comment on column projects.emptying is 'Deleted, and some agent may still have to be archived.';
create index concurrently if not exists projects_emptying on projects (deleted_at) where emptying;

-- Archived agents are listed too, when asked for.
create index concurrently if not exists agents_archived on agents (project_id, created_at desc, id desc)
  where archived_at is not null;

-- Files of long results from before the mark was kept: some may belong to a result that never came. The sweep looks at
-- each of them once.
update artifacts set loose = true
where media_type = 'text/plain' and filename like '%-result.txt' and size > 51200
  and created_at < (select applied_at from schema_migrations where version = 9);
