-- name: drain
-- What a channel has to hand over: up to $4 queued processes, oldest first, up to $5 actions whose turn it is, and every
-- process that is to be ended. What is in $3 was handed over on this channel. An idle machine costs three empty index looks.
-- A first row without a kind says that the channel is the live one. Index: machine_runtimes_pkey, processes_queued,
-- process_actions_open, processes_live.
with r as materialized (
  select machine_id from machine_runtimes
  where id = $1 and session_id = $2 and state = 'active' and lease_expires_at > statement_timestamp()
),
q as (
  select p.*, row_number() over (order by p.created_at, p.id) as place from (
    select p.id, p.created_at, p.io_mode, p.command, p.shell, p.cwd, p.env, p.secret_env, p.wait_ms, p.timeout_seconds,
           p.project_id, p.machine_id
    from r join processes p on p.machine_id = r.machine_id
    where p.state = 'queued' and p.id <> all($3::uuid[])
      and (select b.state from agent_machine_bindings b where b.id = p.binding_id) = 'attached'
      and (select true from machine_grants g
            where g.machine_id = p.machine_id and g.project_id = p.project_id and g.deleted_at is null)
    order by p.created_at, p.id limit $4) p
),
a as (
  select a.id, a.process_id, a.machine_id, a.kind, a.seq, a.payload, a.created_at
  from r join process_actions a on a.machine_id = r.machine_id join processes p on p.id = a.process_id
  where a.state = 'queued' and a.id <> all($3)
    and (p.state = 'running' or a.kind = 'read' and p.state in ('exited', 'failed', 'killed', 'unknown'))
    and not exists (select from process_actions e
                     where e.process_id = a.process_id and e.seq < a.seq and e.state in ('queued', 'accepted'))
  order by a.created_at, a.id limit $5
)
select null as kind, null::uuid as process_id, null::uuid as action_id, null::bigint as place, null as io_mode, null as command,
       null as shell, null as cwd, null::jsonb as env, null::jsonb as secret_env, null::integer as wait_ms,
       null::integer as timeout_seconds, null::uuid as project_id, machine_id, null::json as payload
from r
union all
select 'process', q.id, null, q.place, q.io_mode, q.command, q.shell, q.cwd, q.env, q.secret_env, q.wait_ms, q.timeout_seconds,
       q.project_id, q.machine_id, null
from q
union all
select a.kind, a.process_id, a.id, a.seq, null, null, null, null, null, null, null, null, null, a.machine_id, a.payload from a
union all
select 'end', p.id, null, null, null, null, null, null, null, null, null, null, null, p.machine_id, null
from r join processes p on p.machine_id = r.machine_id
where p.terminate_requested is not null and p.state in ('starting', 'running')
order by place nulls first;

-- name: accept_process
-- The grant: a queued process is the machine's to run, once. The share lock on the runtime's row makes a registration,
-- an end or another channel come wholly before or wholly after. Index: machine_runtimes_pkey, processes_pkey.
with r as (
  select r.id, r.machine_id from machine_runtimes r
  where r.id = $1 and r.session_id = $2 and r.state = 'active' and r.lease_expires_at > statement_timestamp()
  for share
)
update processes p set state = 'starting', granted_at = statement_timestamp(), runtime_id = r.id
from r
where p.id = $3 and p.machine_id = r.machine_id and p.state = 'queued'
  and (select b.state from agent_machine_bindings b where b.id = p.binding_id) = 'attached'
  and (select true from machine_grants g
        where g.machine_id = p.machine_id and g.project_id = p.project_id and g.deleted_at is null)
returning p.id, p.machine_id;

-- name: accept_action
-- The grant of an action whose turn it is. Index: machine_runtimes_pkey, process_actions_pkey, unique key of process_actions.
with r as (
  select r.id, r.machine_id from machine_runtimes r
  where r.id = $1 and r.session_id = $2 and r.state = 'active' and r.lease_expires_at > statement_timestamp()
  for share
)
update process_actions a set state = 'accepted', accepted_at = statement_timestamp()
from r, processes p
where a.id = $4 and a.process_id = $3 and a.machine_id = r.machine_id and a.state = 'queued' and p.id = a.process_id
  and (p.state = 'running' or a.kind = 'read' and p.state in ('exited', 'failed', 'killed', 'unknown'))
  and not exists (select from process_actions e
                   where e.process_id = a.process_id and e.seq < a.seq and e.state in ('queued', 'accepted'))
returning p.state, p.default_cursor, a.machine_id;

-- name: lock_for_report
-- Lock agent and process that a report is about, in this order, if the runtime may report it: the machine's current one,
-- active or ended because it fell silent. Index: machine_runtimes_pkey, processes_pkey, agent_sched_pkey.
select s.agent_id, s.project_id, s.gate, s.worker_id, s.next_sequence, s.next_rank, s.turn_id, s.turn_sequence, s.turn_open,
       s.batch_sequence, s.open_calls, s.attempt, s.retry_at, s.step_number, s.deaths, s.history_version, s.config_id,
       p.id, p.agent_id, p.machine_id, p.tool_call_id, p.purpose, p.state, p.reason_code, p.exit_code, p.exit_signal,
       p.terminate_requested, p.default_cursor, p.next_action_seq, p.granted_at, p.started_at, p.ended_at, p.closed_at,
       p.project_id, p.secret_env,
       m.last_activity_at < statement_timestamp() - interval '30 seconds' as quiet,
       m.generation > 1 and m.last_activity_at = m.activated_at as replaced
from machine_runtimes r
join machines m on m.id = r.machine_id and m.current_runtime_id = r.id
join processes p on p.machine_id = r.machine_id
join agent_sched s on s.agent_id = p.agent_id
where r.id = $1 and p.id = $2
  and (r.state = 'active' or r.state_reason_code = 'daemon_lease_expired')
for no key update of s, p;

-- name: lock_waiting_report
-- The same with the call that waits for the process, locked after it; no row when none waits. The usual first report needs
-- no other question. Index: machine_runtimes_pkey, processes_pkey, agent_sched_pkey, tool_calls_agent_id_id_key.
select s.agent_id, s.project_id, s.gate, s.worker_id, s.next_sequence, s.next_rank, s.turn_id, s.turn_sequence, s.turn_open,
       s.batch_sequence, s.open_calls, s.attempt, s.retry_at, s.step_number, s.deaths, s.history_version, s.config_id,
       p.id, p.agent_id, p.machine_id, p.tool_call_id, p.purpose, p.state, p.reason_code, p.exit_code, p.exit_signal,
       p.terminate_requested, p.default_cursor, p.next_action_seq, p.granted_at, p.started_at, p.ended_at, p.closed_at,
       p.project_id, p.secret_env,
       m.last_activity_at < statement_timestamp() - interval '30 seconds' as quiet,
       m.generation > 1 and m.last_activity_at = m.activated_at as replaced,
       t.id as call_id, t.agent_id, t.output_sequence, t.ordinal, t.turn_id, t.turn_sequence, t.provider_call_id, t.name,
       t.type, t.input, t.state as call_state, t.outcome, t.created_at, t.completed_at
from machine_runtimes r
join machines m on m.id = r.machine_id and m.current_runtime_id = r.id
join processes p on p.machine_id = r.machine_id
join agent_sched s on s.agent_id = p.agent_id
join tool_calls t on t.agent_id = p.agent_id and t.id = p.tool_call_id
where r.id = $1 and p.id = $2 and t.state = 'waiting'
  and (r.state = 'active' or r.state_reason_code = 'daemon_lease_expired')
for no key update of s, p, t;

-- name: publish_result
-- The result of one call of a locked agent: event, call and hot row in one statement. $11: the agent has something to do.
-- $12 not null: with the end of that locked process, as in process_finished ($13 to $20); both closed at one time.
-- Index: events_pkey, tool_calls_agent_id_id_key, agent_sched_pkey, processes_pkey.
with e as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, payload)
  values ($1, $2, $3, 'tool_result', $4, $5, $6::json)
),
c as (
  update tool_calls set state = 'completed', outcome = $8, result_sequence = $2, completed_at = statement_timestamp()
  where agent_id = $1 and id = $7 and state = 'waiting' returning id
),
h as (
  update agent_sched set next_sequence = $2 + 1, batch_sequence = $9, open_calls = $10, inputs_gen = inputs_gen + 1,
    ready_at = case when $11::boolean then least(ready_at, statement_timestamp()) else ready_at end
  where agent_id = $1 returning agent_id
),
p as (
  update processes set state = $13, reason_code = $14, reason_message = $15, exit_code = $16, exit_signal = $17,
    started_at = coalesce(started_at, $18), default_cursor = coalesce($19, default_cursor), ended_at = $20,
    closed_at = statement_timestamp()
  where id = $12 returning id
)
select (select count(*) from c) = 1 and (select count(*) from h) = 1
       and ($12::uuid is null or (select count(*) from p) = 1) as whole;

-- name: may_report
-- Whether a runtime's reports count. Index: machine_runtimes_pkey.
select exists (select from machine_runtimes r join machines m on m.id = r.machine_id and m.current_runtime_id = r.id
                where r.id = $1 and (r.state = 'active' or r.state_reason_code = 'daemon_lease_expired'));

-- name: lock_action
-- One action of a locked process. Index: process_actions_pkey.
select id, agent_id, process_id, tool_call_id, seq, kind, payload, state, reason_code, result, closed_at
from process_actions where id = $1 and process_id = $2 for no key update;

-- name: call_of
-- The call that waits for a process or an action; its agent is locked. Index: tool_calls_agent_id_id_key.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at
from tool_calls where agent_id = $1 and id = $2;

-- name: waiting_calls
-- Those of these calls that still wait; their agent is locked. Index: tool_calls_agent_id_id_key.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at
from tool_calls where agent_id = $1 and id = any($2::uuid[]) and state = 'waiting'
order by output_sequence, ordinal;

-- name: process_started
-- A granted process runs. Its row is locked. `$3` null: the read cursor stays. Index: processes_pkey.
update processes set state = 'running', started_at = $2, default_cursor = coalesce($3, default_cursor) where id = $1;

-- name: process_finished
-- A process is over, as its machine saw it. Its row is locked. `$8` null: the read cursor stays. Index: processes_pkey.
update processes set state = $2, reason_code = $3, reason_message = $4, exit_code = $5, exit_signal = $6,
  started_at = coalesce(started_at, $7), default_cursor = coalesce($8, default_cursor), ended_at = $9,
  closed_at = clock_timestamp()
where id = $1;

-- name: action_reported
-- An action is over, as its machine saw it. Its row is locked. Index: process_actions_pkey.
update process_actions set state = $2, reason_code = $3, result = $4, closed_at = clock_timestamp() where id = $1;

-- name: set_cursor
-- Where the next read without a cursor begins. The process is locked. Index: processes_pkey.
update processes set default_cursor = $2 where id = $1;

-- name: lock_agents
-- Lock the hot rows of agents in order of id. Index: agent_sched_pkey.
select agent_id, project_id, gate, worker_id, next_sequence, next_rank, turn_id, turn_sequence, turn_open, batch_sequence,
       open_calls, attempt, retry_at, step_number, deaths, history_version, config_id
from agent_sched where agent_id = any($1::uuid[]) order by agent_id for no key update;

-- name: try_lock_agents
-- The same, without those that somebody else has locked. Index: agent_sched_pkey.
select agent_id, project_id, gate, worker_id, next_sequence, next_rank, turn_id, turn_sequence, turn_open, batch_sequence,
       open_calls, attempt, retry_at, step_number, deaths, history_version, config_id
from agent_sched where agent_id = any($1::uuid[]) order by agent_id for no key update skip locked;

-- name: agents_on
-- Agents with anything open on a machine, or behind claimed processes. Index: processes_live, process_actions_open, processes_pkey.
select agent_id from processes where machine_id = $1 and state in ('queued', 'starting', 'running')
union select agent_id from process_actions where machine_id = $1 and state in ('queued', 'accepted')
union select agent_id from processes where id = any($2::uuid[]) and machine_id = $1;

-- name: lock_processes
-- What registration looks at: processes of a machine that are not over or that are claimed, and those with open actions.
-- Their agents are locked. Index: processes_live, processes_pkey, process_actions_open.
select id, agent_id, tool_call_id, purpose, state, granted_at is not null as granted
from processes
where machine_id = $1 and (state in ('queued', 'starting', 'running') or id = any($2::uuid[])
  or id = any(array(select process_id from process_actions where machine_id = $1 and state in ('queued', 'accepted'))))
  and agent_id = any($3::uuid[])
order by id for no key update;

-- name: requeue_reads
-- Every read that a machine had begun is to be done again: reading changes nothing. Index: process_actions_open.
update process_actions set state = 'queued', accepted_at = null
where machine_id = $1 and state = 'accepted' and kind = 'read' and agent_id = any($2::uuid[]);

-- name: lock_actions
-- Actions of locked processes, above the number that their machine has done with ($2, parallel to $1) or still open.
-- Processes are named twice so that no plan looks through all actions. Index: unique key of process_actions.
select a.id, a.agent_id, a.process_id, a.tool_call_id, a.seq, a.kind, a.payload, a.state, a.reason_code
from process_actions a join unnest($1::uuid[], $2::bigint[]) as c (process_id, resolved) on a.process_id = c.process_id
where a.process_id = any($1::uuid[]) and (a.seq > c.resolved or a.state in ('queued', 'accepted'))
order by a.process_id, a.seq for no key update of a;

-- name: end_processes
-- End processes that are not over, for a reason of the server's; arrays are parallel. Index: processes_pkey.
update processes p set state = i.state, reason_code = i.reason, exit_code = null, closed_at = clock_timestamp()
from unnest($1::uuid[], $2::text[], $3::text[]) as i (id, state, reason)
where p.id = i.id and p.state in ('queued', 'starting', 'running')
returning p.id, p.agent_id, p.machine_id, p.tool_call_id, p.purpose, p.state, p.reason_code;

-- name: end_actions
-- End actions that are open, for a reason of the server's; arrays are parallel. Index: process_actions_pkey.
update process_actions a set state = i.state, reason_code = i.reason, closed_at = clock_timestamp()
from unnest($1::uuid[], $2::text[], $3::text[]) as i (id, state, reason), processes p
where a.id = i.id and a.state in ('queued', 'accepted') and p.id = a.process_id
returning a.id, a.agent_id, a.machine_id, a.process_id, a.tool_call_id, a.kind, a.state, a.reason_code, p.state as process_state;

-- name: end_actions_of
-- End what waited for processes that are over now. Reads stay if there may be output. Index: unique key of process_actions.
update process_actions a set
  state = case when a.kind = 'terminate' and p.state <> 'unknown' then 'applied' else 'failed' end,
  reason_code = case when a.kind = 'read' then 'output_unavailable'
                     when a.kind <> 'terminate' then 'process_terminal'
                     when p.state = 'unknown' then 'process_state_unknown' else 'already_stopped' end,
  closed_at = clock_timestamp()
from processes p
where a.process_id = any($1::uuid[]) and p.id = a.process_id and a.state = 'queued'
  and p.state in ('exited', 'failed', 'killed', 'unknown') and (a.kind <> 'read' or p.granted_at is null)
returning a.id, a.agent_id, a.machine_id, a.process_id, a.tool_call_id, a.kind, a.state, a.reason_code, p.state as process_state;

-- name: cancel_processes
-- The processes of canceled calls ($2; null: all of the agent, or of its binding $3): those that wait end, those that were
-- granted are to be ended by their machine. The hot row is locked. Index: processes_agent_live.
update processes p set
  state = case when p.state = 'queued' then 'failed' else p.state end,
  reason_code = case when p.state = 'queued' then $4 else p.reason_code end,
  closed_at = case when p.state = 'queued' then clock_timestamp() end,
  terminate_requested = case when p.state = 'queued' then null else coalesce(p.terminate_requested, $5) end
where p.agent_id = $1 and p.state in ('queued', 'starting', 'running')
  and ($2::uuid[] is null or p.tool_call_id = any($2)) and ($3::uuid is null or p.binding_id = $3)
returning p.id, p.agent_id, p.machine_id, p.tool_call_id, p.purpose, p.state, p.reason_code;

-- name: cancel_actions
-- The actions of canceled calls ($2; null: all of the agent, or of its binding $3). What a machine has begun is unknown.
-- The hot row is locked. Index: processes_agent, unique key of process_actions.
update process_actions a set
  state = case when a.state = 'queued' or a.kind = 'read' then 'failed' else 'unknown' end,
  reason_code = case when a.state = 'queued' then $4 else $5 end, closed_at = clock_timestamp()
from processes p
where p.id = a.process_id and a.agent_id = $1 and a.state in ('queued', 'accepted')
  and ($2::uuid[] is null or a.tool_call_id = any($2)) and ($3::uuid is null or p.binding_id = $3)
returning a.id, a.agent_id, a.machine_id, a.process_id, a.tool_call_id, a.kind, a.state, a.reason_code, p.state as process_state;

-- name: open_on_machine
-- Everything open on a machine that is taken away: processes with whether they were granted. Their agents are locked.
-- Index: processes_live.
select id, state from processes
where machine_id = $1 and state in ('queued', 'starting', 'running') and agent_id = any($2::uuid[])
order by id for no key update;

-- name: open_actions_on_machine
-- Actions that are open on a machine that is taken away. Their agents are locked. Index: process_actions_open.
select id, kind, state from process_actions
where machine_id = $1 and state in ('queued', 'accepted') and agent_id = any($2::uuid[])
order by process_id, seq for no key update;

-- name: overdue
-- Processes and actions that no machine took within $1 seconds, oldest first. Materialized, so that the order never makes
-- a plan walk an index of all that ever ran. Index: processes_queued, process_actions_open.
with w as materialized (
  select 'process' as what, p.agent_id, p.id, p.created_at from processes p where p.state = 'queued'
  union all
  select 'action', a.agent_id, a.id, a.created_at from process_actions a where a.state = 'queued'
)
select what, agent_id, id from w
where created_at < statement_timestamp() - make_interval(secs => $1)
order by created_at limit $2;

-- name: silent
-- Calls that wait for what a machine took $1 seconds ago and has not spoken of since, though it is there: those of commands
-- that it has not said to have begun, and of actions without an outcome. Index: processes_live, process_actions_open,
-- tool_calls_agent_id_id_key.
with w as materialized (
  select 'process' as what, p.agent_id, p.id, p.granted_at as taken_at from processes p
  where p.state = 'starting' and (select t.state from tool_calls t
                                   where t.agent_id = p.agent_id and t.id = p.tool_call_id) = 'waiting'
  union all
  select 'action', a.agent_id, a.id, a.accepted_at from process_actions a where a.state = 'accepted'
)
select what, agent_id, id from w
where ($3::uuid[] is null or id = any($3)) and taken_at < statement_timestamp() - make_interval(secs => $1)
order by taken_at limit $2;

-- name: unreachable
-- What waits for machines that have been out of reach for $1 seconds: since the later of the work's making, the machine's
-- loss (of its channel, its lease or its runtime) and the start of Postgres; not while somebody is waking the machine.
-- A machine to which no daemon ever came is out of reach as well. So is one of a pool that nobody makes: since it was due,
-- or since the provider could not be asked. One that a replica is at work on is not, and neither is one that waits its turn
-- while any replica makes another at its place.
-- A process that runs is here only while a call waits for it. Index: processes_live, process_actions_open, machines_pkey,
-- machine_runtimes_pkey, machines_due, tool_calls_agent_id_id_key.
with busy as (
  select machine_id from processes where state in ('queued', 'starting', 'running')
  union
  select machine_id from process_actions where state in ('queued', 'accepted')
),
away as materialized (
  select m.id, greatest(pg_postmaster_start_time(), least(
           r.lease_expires_at, coalesce(r.disconnected_at, 'infinity'), coalesce(r.ended_at, 'infinity'))) as since
  from busy join machines m on m.id = busy.machine_id join machine_runtimes r on r.id = m.current_runtime_id
  where (r.state = 'ended' or r.session_id is null or r.lease_expires_at < statement_timestamp())
    and (m.wake_until is null or m.wake_until < statement_timestamp())
  union all
  select m.id, greatest(pg_postmaster_start_time(),
                        case when m.lifecycle_state = 'active' then coalesce(m.activated_at, m.updated_at)
                             when m.lifecycle_reason_code = 'provider_unavailable' then m.updated_at
                             else m.next_reconcile_after end)
  from busy join machines m on m.id = busy.machine_id
  where m.current_runtime_id is null and m.asleep_since is null
    and (m.lifecycle_state = 'active'
         or m.lifecycle_state in ('provisioning', 'provision_failed')
            and (m.claimed_until is null or m.claimed_until < statement_timestamp())
            and not exists (select from machines o
                             where o.lifecycle_state in ('provisioning', 'provision_failed', 'deleting', 'delete_failed')
                               and o.claimed_until > statement_timestamp() and o.provider = m.provider
                               and (m.resource_host is null or o.resource_host = m.resource_host)))
),
late as materialized (
  select id from away where since < statement_timestamp() - make_interval(secs => $1)
),
w as materialized (
  select 'process' as what, p.agent_id, p.id, p.created_at
  from late join processes p on p.machine_id = late.id
  where p.state in ('queued', 'starting', 'running')
    and (p.state = 'queued' or (select t.state from tool_calls t
                                 where t.agent_id = p.agent_id and t.id = p.tool_call_id) = 'waiting')
  union all
  select 'action', a.agent_id, a.id, a.created_at
  from late join process_actions a on a.machine_id = late.id where a.state in ('queued', 'accepted')
)
select what, agent_id, id from w
where ($3::uuid[] is null or id = any($3)) and created_at < statement_timestamp() - make_interval(secs => $1)
order by created_at limit $2;

-- name: unmade
-- Of these machines those of pools that nobody reaches: what is known of each. Index: machines_pkey.
select id, provider, lifecycle_state, lifecycle_reason_code, lifecycle_reason_message from machines
where id = any($1::uuid[]) and source_kind = 'pool'
  and (lifecycle_state in ('provisioning', 'provision_failed') or current_runtime_id is null);

-- name: try_lock_processes
-- Lock processes of locked agents, without those that somebody else has locked. Index: processes_pkey.
select id, agent_id, machine_id, tool_call_id, purpose, state, reason_code
from processes where id = any($1::uuid[]) and agent_id = any($2::uuid[]) and state in ('queued', 'starting', 'running')
order by id for no key update skip locked;

-- name: try_lock_actions
-- Lock open actions of locked agents, without those that somebody else has locked. Index: process_actions_pkey.
select id, kind, state
from process_actions where id = any($1::uuid[]) and agent_id = any($2::uuid[]) and state in ('queued', 'accepted')
order by id for no key update skip locked;

-- name: project_secrets
-- The current values, sealed, of those secrets that a project's command on a machine may have: the project's own, those
-- granted to it, and those of the organization that the machine itself names.
-- Index: secrets_pkey, secret_versions_pkey, unique key of secret_grants, machines_pkey.
select s.id, s.name, s.current_version as version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext
from secrets s join secret_versions v on v.secret_id = s.id and v.version = s.current_version
where s.id = any($1::uuid[]) and s.deleted_at is null
  and (s.owner_project_id = $2
       or exists (select from secret_grants g where g.secret_id = s.id and g.project_id = $2)
       or s.owner_kind = 'org' and exists (
            select from machines m, jsonb_each_text(m.secret_env) e
            where m.id = $3 and m.org_id = s.org_id and e.value = s.id::text));

-- name: past_secrets
-- The newest $2 values, sealed, that secrets ever had: what a command may still know. Index: secret_versions_pkey.
select s.id, s.name, v.version, v.key_id, v.wrapped_key, v.nonce, v.ciphertext
from secrets s join lateral (
  select * from secret_versions o where o.secret_id = s.id order by o.version desc limit $2) v on true
where s.id = any($1::uuid[]);
