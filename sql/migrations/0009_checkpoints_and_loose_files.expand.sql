-- no-transaction
-- Whoever reads an agent that is not in memory starts at its newest checkpoint. Without this it was looked for backwards
-- over the log, which cost a conversation that had none, or whose last one is far back, its whole length each time.
-- Partial, so that the other events pay a comparison of their kind and nothing more. Built beside the running log.
create index concurrently if not exists events_checkpoints on events (agent_id, sequence)
  where kind = 'context_checkpoint';

-- The file of a tool's long result is written before the result is. A worker that dies in between leaves a file that
-- nobody refers to; the mark says which ones may be such, so that nothing else is ever looked at. Files of before, and
-- of an older release that runs meanwhile, count as referred to.
alter table artifacts add column if not exists loose boolean not null default false;
comment on column artifacts.loose is 'Written before what refers to it; cleared by the sweep once the log mentions it.';
create index concurrently if not exists artifacts_loose on artifacts (created_at) where loose;
-- Whose a content is, for the removal of one: without it the foreign key reads the whole table each time.
create index concurrently if not exists artifacts_content on artifacts (org_id, digest);
