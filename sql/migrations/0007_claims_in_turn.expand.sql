-- Claims that go round the projects while there is more work than can run.
create index agent_sched_project on agent_sched (project_id, ready_at, agent_id)
  where worker_id is null and gate = 'open' and ready_at is not null;
