-- name: create_table
-- Makes the list of migrations; only ever run under the migration lock. Index: none.
create table if not exists schema_migrations (
  version     integer primary key,
  name        text not null,
  phase       text not null check (phase in ('expand', 'contract')),
  checksum    text not null,
  seconds     float8 not null,
  applied_at  timestamptz not null default clock_timestamp()
);

-- name: table_exists
-- Whether any migration was ever run here. Index: none.
select to_regclass('schema_migrations') is not null;

-- name: applied
-- All migrations of this database in order. Index: schema_migrations_pkey.
select version, name, phase, checksum from schema_migrations order by version;

-- name: record
-- Notes a migration as done, in the same transaction as its changes where it has one. Index: schema_migrations_pkey.
insert into schema_migrations (version, name, phase, checksum, seconds) values ($1, $2, $3, $4, $5);

-- name: invalid_indexes
-- Those of the named indexes that a concurrent build left unusable. Index: pg_class_relname_nsp_index.
select format('%I.%I', n.nspname, c.relname) as quoted_name
from pg_index i
join pg_class c on c.oid = i.indexrelid
join pg_namespace n on n.oid = c.relnamespace
where c.relname = any($1::text[]) and n.nspname = any(current_schemas(false)) and not i.indisvalid;
