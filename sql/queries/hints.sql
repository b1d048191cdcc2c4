-- name: notify
-- Sends payloads in one commit that does not wait for the disk; the setting ends with this statement's transaction.
-- Index: none.
select set_config('synchronous_commit', 'off', true), pg_notify($1, p.payload)
from unnest($2::text[]) as p (payload);

-- name: is_listening
-- Heartbeat of a listening connection: still registered, not merely still connected. Index: none.
select $1::text in (select pg_listening_channels());
