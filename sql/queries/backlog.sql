-- name: list_backlog
-- Waiting queued messages in the order of their admission, after a (rank, id) key. Index: inputs_waiting.
select id, agent_id, kind, delivery_mode, state, content, metadata, actor_id, control_type, interaction_id, config_id,
       event_sequence, queued_at, rank
from inputs
where agent_id = $1 and state = 'received' and delivery_mode = 'queued' and (rank, id) > ($2, $3::uuid)
order by rank, id limit $4;

-- name: waiting_mode
-- What an input of this agent is, and whether it waits. The hot row is locked. Index: inputs_pkey.
select kind, delivery_mode, state from inputs where agent_id = $1 and id = $2;

-- name: queue_head
-- The first waiting queued message other than $2. The hot row is locked. Index: inputs_waiting.
select id from inputs
where agent_id = $1 and state = 'received' and delivery_mode = 'queued' and id <> $2
order by rank, id limit 1;

-- name: queue_gap
-- The rank of waiting queued message $3 and those of its neighbours, message $2 left out; null where there is none.
-- The hot row is locked. Index: inputs_pkey, inputs_waiting.
select a.rank,
       (select b.rank from inputs b
         where b.agent_id = $1 and b.state = 'received' and b.delivery_mode = 'queued' and b.id <> $2 and b.rank < a.rank
         order by b.rank desc limit 1) as below,
       (select b.rank from inputs b
         where b.agent_id = $1 and b.state = 'received' and b.delivery_mode = 'queued' and b.id <> $2 and b.rank > a.rank
         order by b.rank limit 1) as above
from inputs a
where a.agent_id = $1 and a.id = $3 and a.state = 'received' and a.delivery_mode = 'queued';

-- name: renumber_queue
-- Give the waiting queued messages the ranks $2, 2 * $2, … in their present order. The hot row is locked.
-- Index: inputs_waiting, inputs_pkey.
update inputs i set rank = o.place * $2::bigint
from (select id, row_number() over (order by rank, id) as place
        from inputs where agent_id = $1 and state = 'received' and delivery_mode = 'queued') o
where i.agent_id = $1 and i.id = o.id;

-- name: place_input
-- Put a waiting message at a rank of a lane. The hot row is locked. Index: inputs_pkey.
update inputs set rank = $3, delivery_mode = $4 where agent_id = $1 and id = $2 and state = 'received'
returning id;

-- name: cancel_input
-- Cancel one waiting queued message. The hot row is locked. Index: inputs_pkey.
update inputs set state = 'canceled', resolved_at = statement_timestamp()
where agent_id = $1 and id = $2 and state = 'received' and delivery_mode = 'queued'
returning id;
