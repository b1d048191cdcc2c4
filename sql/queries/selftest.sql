-- name: server
-- What the server says about itself and about the room that is left on it. Index: none.
select current_setting('server_version_num')::integer as version,
       current_setting('server_version') as version_text,
       current_setting('server_encoding') as encoding,
       current_setting('fsync') as fsync,
       current_setting('full_page_writes') as full_page_writes,
       current_schema() as schema_name,
       coalesce(has_schema_privilege(current_schema(), 'create'), false) as may_create,
       current_setting('max_connections')::integer as max_connections,
       current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
         - (select sum(numbackends)::integer from pg_stat_database) as free_connections,
       coalesce((select extract(epoch from max(clock_timestamp() - xact_start))::float8
                 from pg_stat_activity where backend_xmin is not null and backend_type = 'client backend'), 0) as oldest_s,
       pg_notification_queue_usage() as queue;

-- name: settings
-- This session's settings in the server's own units. Index: none.
select name, setting from pg_settings;

-- name: notify
-- Sends one empty notification. Index: none.
select pg_notify($1, '');
