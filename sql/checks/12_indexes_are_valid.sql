-- No index was left invalid by an interrupted migration.
select i.indexrelid::regclass::text as index_name
from pg_index i join pg_class c on c.oid = i.indexrelid
where not i.indisvalid and c.relnamespace = current_schema()::regnamespace;
