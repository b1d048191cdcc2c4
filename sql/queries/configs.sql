-- name: insert_config
-- A compiled config; no row when the same meaning in the same words is there. Index: unique key of agent_configs.
insert into agent_configs (id, org_id, project_id, source, source_format, source_hash, definition, definition_hash,
                           instruction_hash, configured_model_id)
values ($1, $2, $3, $4, $5, $6, $7::json, $8, $9, $10)
on conflict (project_id, definition_hash, source_format, source_hash) do nothing
returning id, org_id, project_id, source, source_format, definition, definition_hash, instruction_hash,
  configured_model_id, created_at;

-- name: find_same_config
-- The config with this meaning and these words. Index: unique key of agent_configs.
select id, org_id, project_id, source, source_format, definition, definition_hash, instruction_hash, configured_model_id,
       created_at
from agent_configs
where project_id = $1 and definition_hash = $2 and source_format = $3 and source_hash = $4;

-- name: find_config
-- One config of a project. Index: agent_configs_pkey.
select id, org_id, project_id, source, source_format, definition, definition_hash, instruction_hash, configured_model_id,
       created_at
from agent_configs where id = $1 and project_id = $2;
