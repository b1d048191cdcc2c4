-- name: ping
-- Whether this session can do anything at all, and whether it may write; for readiness.
select not current_setting('transaction_read_only')::boolean as writable;

-- name: connection_room
-- How many connections the server allows to ordinary roles, and how many are taken now.
select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as allowed,
       (select count(*) from pg_stat_activity where backend_type = 'client backend')::int as taken;
