-- name: add_machine_grant
-- Let a project use a locked machine; no row when it may already, or when the idempotency key is used.
-- Index: machine_grants_machine, machine_grants_key.
insert into machine_grants (id, org_id, project_id, machine_id, source_kind, description, metadata, idempotency_key)
values ($1, $2, $3, $4, 'explicit', $5, $6::jsonb, $7)
on conflict do nothing returning id;

-- name: find_machine_grant
-- A project's grant of a machine by its id ($2) or idempotency key ($3); by key a deleted one, too.
-- Index: machine_grants_pkey, machine_grants_key.
select id, org_id, project_id, machine_id, source_kind, pool_grant_id, description, metadata::text as metadata, created_at,
       updated_at, deleted_at
from machine_grants
where project_id = $1 and (idempotency_key = $3::text or (id = $2::uuid and deleted_at is null));

-- name: list_machine_grants
-- The machines that a project was given one by one. Index: machine_grants_machine.
select l.*, c.state as connection_state, c.reason as connection_reason from (
  select case $1::text when 'name' then m.display_name
              else to_char(case $1::text when 'updated_at' then g.updated_at else g.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         g.id as grant_id, g.project_id, g.machine_id, g.source_kind as grant_source_kind, g.pool_grant_id,
         g.description as grant_description, g.metadata::text as grant_metadata, g.created_at as grant_created_at,
         g.updated_at as grant_updated_at, g.deleted_at as grant_deleted_at,
         m.id, m.org_id, m.source_kind, m.display_name, m.description, m.provider, m.lifecycle_state,
         m.last_observed_at, m.deleted_at, m.created_at, m.updated_at
  from machine_grants g join machines m on m.id = g.machine_id and m.deleted_at is null
  where g.project_id = $7 and g.deleted_at is null and g.source_kind = 'explicit'
    and ($3::text is null or m.display_name ilike $3)) l
join machine_connections c on c.machine_id = l.id
where ($4::text is null or case when $2::boolean then (l.key, l.grant_id) < ($4, $5::uuid)
                                else (l.key, l.grant_id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.grant_id end desc, l.key, l.grant_id limit $6;

-- name: drop_machine_grant
-- Take a locked machine from a project. Index: machine_grants_pkey.
update machine_grants set deleted_at = statement_timestamp(), updated_at = statement_timestamp()
where id = $1 and deleted_at is null returning id;

-- name: project_machine_grants
-- Some grants of machines that a project was given one by one. Index: machine_grants_machine.
select id from machine_grants where project_id = $1 and deleted_at is null and source_kind = 'explicit'
order by created_at, id limit $2;
