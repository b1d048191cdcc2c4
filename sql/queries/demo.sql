-- name: read_only
-- Makes the rest of this session refuse every write: whoever counts must not change what is counted.
set session characteristics as transaction read only;

-- name: log_faults
-- How many numbers are missing in an agent's log, and how many results a call has beyond its first one.
-- Index: events_pkey.
select coalesce(max(sequence), 0) - count(*) as gaps,
       count(*) filter (where kind = 'tool_result')
         - count(distinct payload ->> 'tool_call_id') filter (where kind = 'tool_result') as duplicate_results
  from events
 where agent_id = $1;

-- name: steps_by_state
-- How many steps an agent has in each state, and how many of its outputs are claimed by more than one saved model step.
-- Index: steps_pkey.
select state, count(*) as steps,
       count(*) filter (where kind = 'model')
         - count(distinct output_sequence) filter (where kind = 'model') as shared_outputs
  from steps
 where agent_id = $1
 group by state;

-- name: event_ids
-- Sequence and id of every event of an agent: what was seen before a crash must be there after it.
-- Index: events_pkey.
select sequence, id from events where agent_id = $1 order by sequence;
