-- name: advance
-- The one write of a claim holder, for up to 32 agents at once: save what a step produced, admit inputs, begin the next
-- step, or give the claim back. Every part takes its rows from the fenced update `u`. The next step begins only if nobody
-- else has written to the agent (`inputs_gen`) and its gate is open; otherwise the claim is given back, ready now.
-- `mode`: begin | release | hold (save results of a running step and keep it). `retry_s`: null keeps, -1 clears.
-- A repeat of a save of unknown outcome names the sequence and step that were read when it had not happened yet: should
-- the first one arrive after all, both have moved and the repeat writes nothing.
-- Index: agent_sched_pkey, steps_pkey, tool_calls (agent_id, id), inputs_pkey.
with item as materialized (
  select * from unnest(
    $2::uuid[], $3::bigint[], $4::bigint[], $5::bigint[], $6::text[], $7::integer[], $8::integer[],
    $9::boolean[], $10::integer[], $11::integer[], $12::integer[], $13::integer[], $14::float8[],
    $15::bigint[], $16::text[], $17::text[], $18::text[], $19::text[], $20::text[], $21::integer[], $22::uuid[],
    $23::uuid[], $24::uuid[], $25::uuid[], $26::boolean[], $27::text[], $28::float8[], $67::bigint[], $68::bigint[]
  ) with ordinality as i (
    agent_id, claim_token, epoch, gen, mode, events, admits,
    turn_open, output_offset, opened, answered, attempt, retry_s,
    close_step, close_state, close_usage, close_error, close_action, kind, next_attempt, call_id,
    config_id, revision_id, turn_id, new_turn, secrets, ready_s, seen_sequence, seen_step, ord)
),
locked as materialized (
  select s.agent_id, i.ord
  from item i join agent_sched s on s.agent_id = i.agent_id
  where s.worker_id = $1 and s.claim_token = i.claim_token and s.epoch = i.epoch
    and (i.seen_sequence is null or (s.next_sequence = i.seen_sequence and s.step_number = i.seen_step))
  order by s.agent_id
  for no key update of s skip locked
),
u as (
  update agent_sched s set
    worker_id = case when i.mode = 'hold' or (i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open')
                     then s.worker_id end,
    claim_token = case when i.mode = 'hold' or (i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open')
                       then s.claim_token end,
    ready_at = case
      when i.mode = 'hold' then s.ready_at
      when s.inputs_gen <> i.gen or s.gate <> 'open' then least(s.ready_at, statement_timestamp())
      when i.mode = 'begin' then null
      else statement_timestamp() + make_interval(secs => i.ready_s) end,
    next_sequence = s.next_sequence + i.events
      + case when i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then i.admits else 0 end,
    turn_open = case when i.admits > 0 and i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then true
                     else coalesce(i.turn_open, s.turn_open) end,
    batch_sequence = case when i.opened > 0 then s.next_sequence + i.output_offset
                          when i.opened = 0 or s.open_calls - i.answered <= 0 then null
                          else s.batch_sequence end,
    open_calls = case when i.opened is not null then i.opened else s.open_calls - i.answered end,
    attempt = case when i.admits > 0 and i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then 0
                   else coalesce(i.attempt, s.attempt) end,
    retry_at = case when (i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open') or i.retry_s < 0 then null
                    when i.retry_s is null then s.retry_at
                    else statement_timestamp() + make_interval(secs => i.retry_s) end,
    step_number = s.step_number
      + case when i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then 1 else 0 end,
    turn_id = case when i.new_turn and i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open'
                   then i.turn_id else s.turn_id end,
    turn_sequence = s.turn_sequence
      + case when i.new_turn and i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then 1 else 0 end,
    deaths = case when i.close_step is null then s.deaths else 0 end
  from item i join locked l on l.ord = i.ord
  where s.agent_id = l.agent_id and s.worker_id = $1 and s.claim_token = i.claim_token and s.epoch = i.epoch
  returning s.agent_id, i.ord, s.next_sequence, s.inputs_gen, s.turn_id, s.turn_sequence, s.step_number,
    s.batch_sequence, s.ready_at, s.worker_id is not null as kept, i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' as begun,
    s.next_sequence - i.events
      - case when i.mode = 'begin' and s.inputs_gen = i.gen and s.gate = 'open' then i.admits else 0 end as first_sequence,
    i.events, i.output_offset, i.close_step, i.close_state, i.close_usage, i.close_error, i.close_action, i.retry_s,
    i.kind, i.next_attempt, i.call_id, i.config_id, i.revision_id, i.new_turn, i.secrets, s.epoch
),
new_events as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload, meta, replay)
  select u.agent_id, u.first_sequence + e.position, e.id, e.kind, e.turn_id, coalesce(e.turn_sequence, u.turn_sequence),
         e.is_opening, e.is_semantic, e.payload::json, e.meta::json, e.replay
  from unnest($29::bigint[], $30::integer[], $31::uuid[], $32::text[], $33::uuid[], $34::bigint[], $35::boolean[],
              $36::boolean[], $37::text[], $38::text[], $39::bytea[])
    as e (ord, position, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload, meta, replay)
  join u on u.ord = e.ord
  where e.position < u.events or u.begun
),
new_turns as (
  insert into turns (agent_id, turn_sequence, id, first_sequence)
  select u.agent_id, u.turn_sequence, u.turn_id, u.first_sequence + u.events from u where u.begun and u.new_turn
),
closed as (
  update steps s set state = u.close_state, finished_at = statement_timestamp(), usage = u.close_usage::json,
    error = u.close_error::json, next_action = u.close_action,
    output_sequence = coalesce(s.output_sequence, u.first_sequence + u.output_offset),
    retry_at = case when u.retry_s >= 0 then statement_timestamp() + make_interval(secs => u.retry_s) end
  from u
  where s.agent_id = u.agent_id and s.number = u.close_step and s.state = 'started'
),
opened as (
  insert into steps (agent_id, number, kind, attempt, frontier, call_id, turn_id, config_id, revision_id, worker_id,
                     epoch, output_sequence, secrets_used)
  select u.agent_id, u.step_number, u.kind, u.next_attempt, u.next_sequence - 1, u.call_id, u.turn_id, u.config_id,
         u.revision_id, $1, u.epoch, case when u.kind = 'tools' then u.batch_sequence end,
         coalesce(string_to_array(u.secrets, ','), '{}')
  from u where u.begun
),
new_calls as (
  insert into tool_calls (agent_id, output_sequence, ordinal, id, turn_id, turn_sequence, provider_call_id, name, type,
                          input, state, outcome, step_number, result_sequence, started_at, completed_at)
  select u.agent_id, u.first_sequence + u.output_offset, c.ordinal, c.id, c.turn_id, c.turn_sequence, c.provider_call_id,
         c.name, c.type, c.input::json,
         case when c.run and u.begun then 'running' else c.state end, c.outcome,
         case when c.run and u.begun then u.step_number end, u.first_sequence + c.result_position,
         case when c.run and u.begun then statement_timestamp() end,
         case when c.state = 'completed' then statement_timestamp() end
  from unnest($40::bigint[], $41::integer[], $42::uuid[], $43::uuid[], $44::bigint[], $45::text[], $46::text[], $47::text[],
              $48::text[], $49::text[], $50::text[], $51::integer[], $52::boolean[])
    as c (ord, ordinal, id, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
          result_position, run)
  join u on u.ord = c.ord
),
moved_calls as (
  update tool_calls t set state = m.state, outcome = m.outcome, result_sequence = u.first_sequence + m.result_position,
    step_number = case when m.state = 'running' then u.step_number else t.step_number end,
    started_at = case when m.state = 'running' then statement_timestamp() else t.started_at end,
    completed_at = case when m.state = 'completed' then statement_timestamp() end
  from unnest($53::bigint[], $54::uuid[], $55::text[], $56::text[], $57::integer[], $58::text[])
    as m (ord, id, state, outcome, result_position, from_state)
  join u on u.ord = m.ord
  where t.agent_id = u.agent_id and t.id = m.id and t.state = m.from_state and (m.state <> 'running' or u.begun)
),
asked as (
  insert into interactions (agent_id, id, tool_call_id, kind, request)
  select u.agent_id, x.id, x.tool_call_id, x.kind, x.request::json
  from unnest($59::bigint[], $60::uuid[], $61::uuid[], $62::text[], $63::text[]) as x (ord, id, tool_call_id, kind, request)
  join u on u.ord = x.ord
),
admitted as (
  update inputs n set state = 'resolved', event_sequence = u.first_sequence + a.position,
    resolved_at = statement_timestamp()
  from unnest($64::bigint[], $65::uuid[], $66::integer[]) as a (ord, id, position)
  join u on u.ord = a.ord
  where u.begun and n.agent_id = u.agent_id and n.id = a.id and n.event_sequence is null
)
select u.ord, u.begun, u.kept, u.first_sequence, u.next_sequence, u.inputs_gen, u.turn_id, u.turn_sequence, u.step_number,
       u.batch_sequence, u.ready_at is not null as ready, statement_timestamp() as saved_at
from u;
