-- name: find_call
-- One tool call. Index: tool_calls_agent_id_id_key.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at
from tool_calls where agent_id = $1 and id = $2;

-- name: open_calls
-- The calls without a result of one output, in order. The hot row is locked. Index: tool_calls_pkey.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at
from tool_calls where agent_id = $1 and output_sequence = $2 and state <> 'completed' order by ordinal;

-- name: all_open_calls
-- Every call of an agent without a result, in order. The hot row is locked. Index: tool_calls_pkey.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at
from tool_calls where agent_id = $1 and state <> 'completed' order by output_sequence, ordinal;

-- name: complete_calls
-- Give calls of a locked agent their results; arrays are parallel. Touches no completed call.
-- Index: tool_calls_agent_id_id_key.
update tool_calls t set state = 'completed', outcome = c.outcome, result_sequence = c.result_sequence,
  completed_at = statement_timestamp()
from unnest($2::uuid[], $3::text[], $4::bigint[]) as c (id, outcome, result_sequence)
where t.agent_id = $1 and t.id = c.id and t.state <> 'completed'
returning t.id, t.agent_id, t.output_sequence, t.ordinal, t.turn_id, t.turn_sequence, t.provider_call_id, t.name, t.type,
  t.input, t.state, t.outcome, t.created_at, t.completed_at;

-- name: move_call
-- Move one call of a locked agent from a state to another. Index: tool_calls_agent_id_id_key.
update tool_calls set state = $4 where agent_id = $1 and id = $2 and state = $3 returning id;

-- name: batches_of_results
-- Output and result sequences of every call whose output or result is one of the given sequences.
-- Reads all calls of one agent: only an operator's resume does. Index: tool_calls_pkey.
select t.output_sequence, t.result_sequence
from tool_calls t
where t.agent_id = $1 and t.output_sequence in (
  select c.output_sequence from tool_calls c
  where c.agent_id = $1 and (c.output_sequence = any($2::bigint[]) or c.result_sequence = any($2::bigint[])));

-- name: list_calls
-- Tool calls, oldest first, after a (time, id) key; filters are null when absent. Reads the calls of one agent. Up to $6,
-- fewer when their inputs together pass $7 bytes (see `events_after`); `found` says how many there were, up to $6.
-- Index: tool_calls_pkey.
select id, agent_id, output_sequence, ordinal, turn_id, turn_sequence, provider_call_id, name, type, input, state, outcome,
       created_at, completed_at, found
from (
  select s.*, sum(s.size) over (order by created_at, id) - s.size as bytes_before
  from (
    select q.*, case when pg_column_compression(input) is null then stored else octet_length(input::text) end as size
    from (
      select p.*, sum(p.stored) over (order by created_at, id) - p.stored as stored_before, count(*) over () as found
      from (select *, pg_column_size(input) as stored from tool_calls
             where agent_id = $1 and ($2::text is null or state = $2) and ($3::text is null or type = $3)
               and ($4::timestamptz is null or (created_at, id) > ($4, $5::uuid))
             order by created_at, id limit $6) p
    ) q where stored_before < $7
  ) s
) t where bytes_before < $7
order by created_at, id;
