-- name: lock_orphans
-- Lock the hot rows of up to $1 agents after $2 claimed by a worker that is not live, in order of id, skipping locked ones.
-- A standing sweep: runs whether or not somebody just died. Index: agent_sched_worker.
select s.agent_id, s.worker_id, s.epoch, s.next_sequence, s.turn_id, s.turn_sequence, s.step_number, s.batch_sequence,
       s.open_calls, s.deaths, w.state as worker_state
from agent_sched s left join workers w on w.id = s.worker_id
where s.worker_id = any(array(
  select distinct h.worker_id from agent_sched h
  where h.worker_id is not null
    and not exists (select from workers l where l.id = h.worker_id and l.state = 'live')))
  and s.agent_id > $2
order by s.agent_id limit $1
for no key update of s skip locked;

-- name: lock_claim
-- Lock one claimed agent's hot row under its fence (giving a claim back with running tools). Index: agent_sched_pkey.
select s.agent_id, s.worker_id, s.epoch, s.next_sequence, s.turn_id, s.turn_sequence, s.step_number, s.batch_sequence,
       s.open_calls, s.deaths, 'live' as worker_state
from agent_sched s
where s.agent_id = $1 and s.worker_id = $2 and s.claim_token = $3 and s.epoch = $4
for no key update of s;

-- name: running_calls
-- The calls that were running in the steps being taken away. Their hot rows are locked. Index: tool_calls_pkey.
select t.agent_id, t.id, t.ordinal
from tool_calls t
join unnest($1::uuid[], $2::bigint[]) as b (agent_id, batch_sequence)
  on t.agent_id = b.agent_id and t.output_sequence = b.batch_sequence
where t.state = 'running' order by t.agent_id, t.ordinal;

-- name: started_steps
-- Which of these agents have a step that began and was not saved. Index: steps_pkey.
select s.agent_id, s.number, s.kind
from steps s join unnest($1::uuid[], $2::bigint[]) as b (agent_id, number)
  on s.agent_id = b.agent_id and s.number = b.number
where s.state = 'started';

-- name: take_away
-- Give the claims of locked agents back and write the interrupted results of their running calls. Arrays are parallel:
-- agents, number of result events, new deaths, gate, and the epoch ($11) that was read when the row was locked; then per
-- call: agent, position, event id, call id, payload.
-- Index: agent_sched_pkey, tool_calls (agent_id, id), steps_pkey.
with item as materialized (
  select * from unnest($1::uuid[], $2::integer[], $3::smallint[], $4::text[], $11::bigint[])
    as i (agent_id, results, deaths, gate, epoch)
),
u as (
  update agent_sched s set
    worker_id = null, claim_token = null, epoch = s.epoch + 1, inputs_gen = s.inputs_gen + 1,
    next_sequence = s.next_sequence + i.results,
    open_calls = s.open_calls - i.results,
    batch_sequence = case when s.open_calls - i.results <= 0 then null else s.batch_sequence end,
    deaths = i.deaths, gate = case when s.gate = 'open' then i.gate else s.gate end,
    ready_at = least(s.ready_at, statement_timestamp())
  from item i where s.agent_id = i.agent_id and s.epoch = i.epoch and s.worker_id is not null
  returning s.agent_id, s.next_sequence - i.results as first_sequence, s.turn_id, s.turn_sequence, s.step_number, s.deaths,
    s.gate
),
results as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, payload)
  select u.agent_id, u.first_sequence + r.position, r.event_id, 'tool_result', u.turn_id, u.turn_sequence, r.payload::json
  from unnest($5::uuid[], $6::integer[], $7::uuid[], $8::uuid[], $9::text[]) as r (agent_id, position, event_id, call_id, payload)
  join u on u.agent_id = r.agent_id
),
calls as (
  update tool_calls t set state = 'completed', outcome = 'failed', result_sequence = u.first_sequence + r.position,
    completed_at = statement_timestamp()
  from unnest($5::uuid[], $6::integer[], $8::uuid[]) as r (agent_id, position, call_id)
  join u on u.agent_id = r.agent_id
  where t.agent_id = r.agent_id and t.id = r.call_id and t.state = 'running'
),
closed as (
  update steps s set state = $10, finished_at = statement_timestamp(), next_action = 'continue'
  from u where s.agent_id = u.agent_id and s.number = u.step_number and s.state = 'started'
)
select agent_id, first_sequence, deaths, gate from u;

-- name: quarantine_agent
-- Close an agent's gate as crashed and void a range of its log, writing the ordinary output event that tells the reader.
-- Fenced by the claim. Index: agent_sched_pkey, steps_pkey.
with u as (
  update agent_sched s set
    worker_id = null, claim_token = null, epoch = s.epoch + 1, inputs_gen = s.inputs_gen + 1, gate = 'crashed',
    ready_at = null, next_sequence = s.next_sequence + 1, history_version = s.history_version + 1,
    void = s.void + $5::int8multirange, retry_at = null, attempt = 0
  where s.agent_id = $1 and s.worker_id = $2 and s.claim_token = $3 and s.epoch = $4
  returning s.agent_id, s.next_sequence - 1 as sequence, s.turn_id, s.turn_sequence, s.step_number
),
e as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_semantic, payload, meta)
  select u.agent_id, u.sequence, $6, 'model_output', coalesce(u.turn_id, $7), greatest(u.turn_sequence, 1), true, $8::json,
         $9::json
  from u
),
st as (
  update steps t set state = 'failed', finished_at = statement_timestamp(), error = $10::json, next_action = 'crashed'
  from u where t.agent_id = u.agent_id and t.number = u.step_number and t.state = 'started'
)
select agent_id, sequence from u;
