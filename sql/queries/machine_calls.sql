-- name: lock_claimed
-- Lock an agent for its claim holder, with all of its fence: the claim, the step, and a log that has not become shorter; and
-- one of its calls ($7) after it. Columns as `agents.lock_hot_row`, then as `calls.find_call`.
-- Index: agent_sched_pkey, tool_calls_agent_id_id_key.
select s.agent_id, s.project_id, s.gate, s.worker_id, s.next_sequence, s.next_rank, s.turn_id, s.turn_sequence, s.turn_open,
       s.batch_sequence, s.open_calls, s.attempt, s.retry_at, s.step_number, s.deaths, s.history_version, s.config_id,
       t.id as call_id, t.agent_id, t.output_sequence, t.ordinal, t.turn_id, t.turn_sequence, t.provider_call_id, t.name,
       t.type, t.input, t.state as call_state, t.outcome, t.created_at, t.completed_at
from agent_sched s join tool_calls t on t.agent_id = s.agent_id
where s.agent_id = $1 and s.worker_id = $2 and s.claim_token = $3 and s.epoch = $4 and s.step_number = $5
  and s.next_sequence >= $6 and t.id = $7
for no key update of s, t;

-- name: park_call
-- A ready call waits for a machine from here on, if the claim is the caller's. The agent is locked.
-- Index: tool_calls_agent_id_id_key, agent_sched_pkey.
update tool_calls t set state = 'waiting'
from agent_sched s
where t.agent_id = $1 and t.id = $2 and t.state = 'ready' and s.agent_id = t.agent_id
  and s.worker_id = $3 and s.claim_token = $4 and s.epoch = $5
returning t.id;

-- name: insert_process
-- Queue a command for a machine, unless $16 of its agent's are not over; no row then. The agent is locked.
-- Index: processes_agent_live.
insert into processes (id, agent_id, project_id, machine_id, binding_id, tool_call_id, purpose, command, shell, io_mode, cwd,
                       env, secret_env, wait_ms, timeout_seconds)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12::jsonb, $13::jsonb, $14, $15
where (select count(*) from processes where agent_id = $2 and state in ('queued', 'starting', 'running')) < $16
returning id;

-- name: lock_process
-- One process of a locked agent, locked too, and whether somebody wants it to end. Index: processes_pkey.
select p.id, p.machine_id, p.binding_id, p.state, p.io_mode, p.granted_at is not null as granted, p.exit_code,
       p.exit_signal, p.reason_code, p.reason_message, p.default_cursor,
       p.terminate_requested is not null or exists (
         select from process_actions a where a.process_id = p.id and a.kind = 'terminate'
           and a.state in ('queued', 'accepted', 'applied', 'unknown')) as ending
from processes p where p.id = $2 and p.agent_id = $1 and p.purpose = 'command' for no key update of p;

-- name: active_processes
-- The newest processes of an agent that are not over. Index: processes_agent_live.
select p.id, p.state, p.command, p.cwd, p.io_mode, p.created_at, p.started_at, b.machine_ref
from processes p join agent_machine_bindings b on b.id = p.binding_id
where p.agent_id = $1 and p.state in ('queued', 'starting', 'running') and p.purpose = 'command'
order by p.created_at desc, p.id desc limit $2;

-- name: insert_action
-- Queue an action of a process, after those before it; no row when the process is over and it is no read. One of nobody's
-- ($3 null) is for a process that carries a file, and in vain when that is to end or its call is over.
-- Index: processes_pkey, tool_calls_agent_id_id_key.
with n as (
  update processes p set next_action_seq = next_action_seq + 1
  where id = $2 and ($4 = 'read' or state in ('queued', 'starting', 'running'))
    and ($3::uuid is not null or terminate_requested is null and (
      select t.state from tool_calls t where t.agent_id = p.agent_id and t.id = p.tool_call_id) = 'running')
  returning next_action_seq - 1 as seq, agent_id, machine_id
)
insert into process_actions (id, agent_id, process_id, machine_id, tool_call_id, seq, kind, payload)
select $1, n.agent_id, $2, n.machine_id, $3, n.seq, $4, $5::json from n
returning seq;

-- name: lock_internal
-- Lock such a process, before its actions. Index: processes_pkey.
select id from processes where id = $1 for no key update;

-- name: internal_process
-- How a process of this server's own stands. Index: processes_pkey.
select state, exit_code, reason_code, reason_message from processes where id = $1;

-- name: internal_actions
-- How actions of such a process stand, with their results, in order. Index: unique key of process_actions.
select id, state, reason_code, result from process_actions where process_id = $1 and id = any($2::uuid[]) order by seq;

-- name: forget_actions
-- Remove what a machine has done of the actions of such a process: they hold pieces of a file.
-- Index: unique key of process_actions.
delete from process_actions where process_id = $1 and state = 'applied';

-- name: end_internal
-- End such processes: one that waits never runs ($2), one that was granted is to be ended by its machine ($3).
-- Index: processes_pkey.
update processes set
  state = case when state = 'queued' then 'failed' else state end,
  reason_code = case when state = 'queued' then $2 else reason_code end,
  closed_at = case when state = 'queued' then clock_timestamp() end,
  terminate_requested = case when state = 'queued' then null else coalesce(terminate_requested, $3) end
where id = any($1::uuid[]) and state in ('queued', 'starting', 'running');

-- name: lock_transfers
-- The processes that carry files for these calls (agents $1, calls $2, parallel), also those that are over, with their
-- machines. The agents are locked. Index: unique key of processes (agent_id, tool_call_id).
select p.id, p.machine_id
from processes p join unnest($1::uuid[], $2::uuid[]) as c (agent_id, call_id)
  on p.agent_id = c.agent_id and p.tool_call_id = c.call_id
where p.purpose <> 'command' order by p.id for no key update of p;

-- name: lock_pieces
-- The open actions of such processes, which are locked: no machine may take one from here on.
-- Index: unique key of process_actions.
select id from process_actions where process_id = any($1::uuid[]) and state in ('queued', 'accepted')
order by process_id, seq for no key update;

-- name: drop_pieces
-- Remove the actions of such processes with the pieces of files that they hold. One of which a machine may still speak stays,
-- closed and empty, so that its report finds it. Locked before. Index: unique key of process_actions.
with gone as (delete from process_actions where process_id = any($1::uuid[]) and state in ('queued', 'applied'))
update process_actions set
  state = case when state <> 'accepted' then state when kind = 'read' then 'failed' else 'unknown' end,
  reason_code = case when state = 'accepted' then $2 else reason_code end,
  payload = '{}', result = null, closed_at = coalesce(closed_at, clock_timestamp())
where process_id = any($1::uuid[]) and state in ('accepted', 'failed', 'unknown');
