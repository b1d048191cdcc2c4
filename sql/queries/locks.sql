-- name: try_hold
-- Takes a lock for the rest of the session if nobody has it. Index: none.
select pg_try_advisory_lock($1::bigint);

-- name: try_hold_shared
-- Takes a lock for the rest of the session, beside others that share it. Index: none.
select pg_try_advisory_lock_shared($1::bigint);

-- name: release
-- Gives back one exclusive session lock. Index: none.
select pg_advisory_unlock($1::bigint);

-- name: release_all
-- Gives back every session lock of this connection. Index: none.
select pg_advisory_unlock_all();

-- name: free_keys
-- Which of these locks nobody holds, by position. The try-locks end with the statement. Index: none.
select k.position
from unnest($1::bigint[]) with ordinality as k (key, position)
where pg_try_advisory_xact_lock(k.key);
