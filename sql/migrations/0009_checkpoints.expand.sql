-- no-transaction
-- Whoever reads an agent that is not in memory starts at its newest checkpoint. Without this it was looked for backwards
-- over the log, which cost a conversation that had none, or whose last one is far back, its whole length each time.
-- Partial, so that the other events pay a comparison of their kind and nothing more. Built beside the running log.
create index concurrently if not exists events_checkpoints on events (agent_id, sequence)
  where kind = 'context_checkpoint';
