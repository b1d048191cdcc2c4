-- name: taken
-- The one write of a claim holder, for up to 32 agents at once: save what a step produced, admit inputs, begin the next
-- step, or give the claim back. The statement is put together from the parts of this file that a group needs
-- (`omnara/db/advance.py`); each part counts its parameters from $1. Every part takes its rows from the fenced update `u`.
-- The next step begins only if nobody else has written to the agent (`inputs_gen`) and its gate is open; otherwise the
-- claim is given back, ready now.
-- `mode`: begin | release | hold (save results of a running step and keep it). `retry_s`: null keeps, -1 clears.
-- The fence is the claim, and the place in the log that its holder has reached: a failover that loses commits can bring a
-- kept claim back from before its last steps.
-- A repeat of a save of unknown outcome names the sequence that was read when it had not happened yet: should the first
-- one arrive after all, it or the step has moved and the repeat writes nothing.
-- `is not distinct from` keeps the planner off the index by worker, which finds all claims of this process.
-- Index: agent_sched_pkey.
locked as materialized (
  select i.*, i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' as begins,
         s.inputs_gen <> i.gen or s.gate <> 'open' as passed_over
  from unnest(
    $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::integer[], $8::integer[], $9::boolean[],
    $10::integer[], $11::integer[], $12::integer[], $13::integer[], $14::float8[], $15::float8[], $16::boolean[],
    $17::uuid[], $18::boolean[], $19::bigint[], $20::bigint[], $21::bigint[]
  ) with ordinality as i (
    agent_id, claim_token, epoch, gen, mode, events, admits, turn_open, output_position, opened, answered, attempt,
    retry_s, ready_s, closes, turn_id, new_turn, seen_sequence, known_sequence, step, ord)
  join agent_sched s on s.agent_id = i.agent_id
  where s.worker_id is not distinct from $1 and s.claim_token = i.claim_token and s.epoch = i.epoch
    and s.step_number = i.step and s.next_sequence >= i.known_sequence
    and (i.seen_sequence is null or s.next_sequence = i.seen_sequence)
  order by s.agent_id
  for no key update of s skip locked
),
u as (
  update agent_sched s set
    worker_id = case when l.begins or l.mode = 'hold' then s.worker_id end,
    claim_token = case when l.begins or l.mode = 'hold' then s.claim_token end,
    ready_at = case
      when l.mode = 'hold' then s.ready_at
      when l.passed_over then least(s.ready_at, statement_timestamp())
      when l.mode = 'begin' then null
      else statement_timestamp() + make_interval(secs => l.ready_s) end,
    next_sequence = s.next_sequence + l.events + case when l.begins then l.admits else 0 end,
    turn_open = case when l.begins and l.admits > 0 then true else coalesce(l.turn_open, s.turn_open) end,
    batch_sequence = case when l.opened > 0 then s.next_sequence + l.output_position
                          when l.opened = 0 or s.open_calls - l.answered <= 0 then null
                          else s.batch_sequence end,
    open_calls = coalesce(l.opened, s.open_calls - l.answered),
    attempt = case when l.begins and l.admits > 0 then 0 else coalesce(l.attempt, s.attempt) end,
    retry_at = case when l.begins or l.retry_s < 0 then null
                    when l.retry_s is null then s.retry_at
                    else statement_timestamp() + make_interval(secs => l.retry_s) end,
    step_number = s.step_number + case when l.begins then 1 else 0 end,
    turn_id = case when l.begins and l.new_turn then l.turn_id else s.turn_id end,
    turn_sequence = s.turn_sequence + case when l.begins and l.new_turn then 1 else 0 end,
    deaths = case when l.closes then 0 else s.deaths end
  from locked l
  where s.agent_id = l.agent_id and s.worker_id is not distinct from $1 and s.claim_token = l.claim_token
    and s.epoch = l.epoch
  returning s.agent_id, l.ord, s.next_sequence, s.inputs_gen, s.turn_id, s.turn_sequence, s.step_number,
    s.batch_sequence, s.ready_at, s.worker_id, s.epoch, l.begins as begun,
    s.next_sequence - l.events - case when l.begins then l.admits else 0 end as first_sequence,
    l.events, l.output_position, l.retry_s, l.new_turn
)

-- name: events
-- The events of the step, and those of the inputs that the next one admits. Index: events_pkey.
new_events as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload, meta, replay)
  select u.agent_id, u.first_sequence + e.position, e.id, e.kind, e.turn_id, coalesce(e.turn_sequence, u.turn_sequence),
         e.is_opening, e.is_semantic, e.payload::json, e.meta::json, e.replay
  from unnest($1::bigint[], $2::integer[], $3::uuid[], $4::text[], $5::uuid[], $6::bigint[], $7::boolean[],
              $8::boolean[], $9::text[], $10::text[], $11::bytea[])
    as e (ord, position, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload, meta, replay)
  join u on u.ord = e.ord
  where e.position < u.events or u.begun
)

-- name: turns
-- The turn that a step opens. Index: turns_pkey.
new_turns as (
  insert into turns (agent_id, turn_sequence, id, first_sequence)
  select u.agent_id, u.turn_sequence, u.turn_id, u.first_sequence + u.events from u where u.begun and u.new_turn
)

-- name: closed
-- The step that is over. Index: steps_pkey.
closed as (
  update steps s set state = c.state, finished_at = statement_timestamp(), usage = c.usage::json,
    error = c.error::json, next_action = c.next_action,
    output_sequence = coalesce(s.output_sequence, u.first_sequence + u.output_position),
    retry_at = case when u.retry_s >= 0 then statement_timestamp() + make_interval(secs => u.retry_s) end
  from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[])
    as c (ord, number, state, usage, error, next_action)
  join u on u.ord = c.ord
  where s.agent_id = u.agent_id and s.number = c.number and s.state = 'started'
)

-- name: opened
-- The step that begins. Index: steps_pkey.
opened as (
  insert into steps (agent_id, number, kind, attempt, frontier, call_id, turn_id, config_id, revision_id, worker_id,
                     epoch, output_sequence, secrets_used)
  select u.agent_id, u.step_number, b.kind, b.attempt, u.next_sequence - 1, b.call_id, u.turn_id, b.config_id,
         b.revision_id, u.worker_id, u.epoch, case when b.kind = 'tools' then u.batch_sequence end,
         coalesce(string_to_array(b.secrets, ','), '{}')
  from unnest($1::bigint[], $2::text[], $3::integer[], $4::uuid[], $5::uuid[], $6::uuid[], $7::text[])
    as b (ord, kind, attempt, call_id, config_id, revision_id, secrets)
  join u on u.ord = b.ord
  where u.begun
)

-- name: calls
-- The tool calls of the output. Index: tool_calls_pkey.
new_calls as (
  insert into tool_calls (agent_id, output_sequence, ordinal, id, turn_id, turn_sequence, provider_call_id, name, type,
                          input, state, outcome, step_number, result_sequence, started_at, completed_at)
  select u.agent_id, u.first_sequence + u.output_position, c.ordinal, c.id, c.turn_id, c.turn_sequence,
         c.provider_call_id, c.name, c.type, c.input::json,
         case when c.run and u.begun then 'running' else c.state end, c.outcome,
         case when c.run and u.begun then u.step_number end, u.first_sequence + c.result_position,
         case when c.run and u.begun then statement_timestamp() end,
         case when c.state = 'completed' then statement_timestamp() end
  from unnest($1::bigint[], $2::integer[], $3::uuid[], $4::uuid[], $5::bigint[], $6::text[], $7::text[], $8::text[],
              $9::text[], $10::text[], $11::text[], $12::integer[], $13::boolean[])
    as c (ord, ordinal, id, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
          result_position, run)
  join u on u.ord = c.ord
)

-- name: moved
-- Tool calls that change their state. Index: tool_calls (agent_id, id).
moved_calls as (
  update tool_calls t set state = m.state, outcome = m.outcome, result_sequence = u.first_sequence + m.result_position,
    step_number = case when m.state = 'running' then u.step_number else t.step_number end,
    started_at = case when m.state = 'running' then statement_timestamp() else t.started_at end,
    completed_at = case when m.state = 'completed' then statement_timestamp() end
  from unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::integer[], $6::text[])
    as m (ord, id, state, outcome, result_position, from_state)
  join u on u.ord = m.ord
  where t.agent_id = u.agent_id and t.id = m.id and t.state = m.from_state and (m.state <> 'running' or u.begun)
)

-- name: asked
-- Forms for a person. Index: interactions_pkey.
asked as (
  insert into interactions (agent_id, id, tool_call_id, kind, request)
  select u.agent_id, x.id, x.tool_call_id, x.kind, x.request::json
  from unnest($1::bigint[], $2::uuid[], $3::uuid[], $4::text[], $5::text[]) as x (ord, id, tool_call_id, kind, request)
  join u on u.ord = x.ord
)

-- name: admitted
-- Inputs that enter the log. Index: inputs_pkey.
admitted as (
  update inputs n set state = 'resolved', event_sequence = u.first_sequence + a.position,
    resolved_at = statement_timestamp()
  from unnest($1::bigint[], $2::uuid[], $3::integer[]) as a (ord, id, position)
  join u on u.ord = a.ord
  where u.begun and n.agent_id = u.agent_id and n.id = a.id and n.event_sequence is null
)

-- name: answer
-- What the hot row says after it.
select u.ord, u.begun, u.worker_id is not null as kept, u.first_sequence, u.next_sequence, u.inputs_gen, u.turn_id,
       u.turn_sequence, u.step_number, u.batch_sequence, u.ready_at is not null as ready,
       statement_timestamp() as saved_at
from u;
