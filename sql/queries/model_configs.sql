-- name: add_provider
-- A provider config made by API; no row when its name is taken (waits for the other transaction first).
-- Index: model_provider_configs_name.
insert into model_provider_configs (id, org_id, name, preset, api_format, api_variant, base_url, request_path, auth_kind,
                                    auth_header, secret_id, request_timeout_ms)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
on conflict (org_id, name) where deleted_at is null do nothing returning id;

-- name: find_provider
-- A provider config as it is shown. Index: model_provider_configs_pkey, secrets_pkey.
select p.id, p.org_id, p.name, p.origin, p.api_format, p.api_variant, p.base_url, p.request_path, p.auth_kind,
       p.auth_header, p.secret_id, coalesce(s.owner_kind = 'system', true) as own_secret, p.request_timeout_ms,
       p.created_at, p.updated_at
from model_provider_configs p left join secrets s on s.id = p.secret_id
where p.org_id = $1 and p.id = $2 and p.deleted_at is null;

-- name: provider_by_name
-- A provider config by name. Index: model_provider_configs_name.
select p.id, p.org_id, p.name, p.origin, p.api_format, p.api_variant, p.base_url, p.request_path, p.auth_kind,
       p.auth_header, p.secret_id, coalesce(s.owner_kind = 'system', true) as own_secret, p.request_timeout_ms,
       p.created_at, p.updated_at
from model_provider_configs p left join secrets s on s.id = p.secret_id
where p.org_id = $1 and p.name = $2 and p.deleted_at is null;

-- name: count_providers
-- How many provider configs an organization has. Index: model_provider_configs_name.
select count(*)::integer from model_provider_configs where org_id = $1 and deleted_at is null;

-- name: lock_provider
-- Lock a provider config against parallel changes and deletion. Index: model_provider_configs_pkey.
select id from model_provider_configs where org_id = $1 and id = $2 and deleted_at is null for update;

-- name: list_providers
-- The provider configs of an organization. Index: model_provider_configs_name.
select l.* from (
  select case $1::text when 'name' then p.name
              else to_char(case $1::text when 'updated_at' then p.updated_at else p.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         p.id, p.org_id, p.name, p.origin, p.api_format, p.api_variant, p.base_url, p.request_path, p.auth_kind,
         p.auth_header, p.secret_id, coalesce(s.owner_kind = 'system', true) as own_secret, p.request_timeout_ms,
         p.created_at, p.updated_at
  from model_provider_configs p left join secrets s on s.id = p.secret_id
  where p.org_id = $7 and p.deleted_at is null) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;

-- name: change_provider
-- Point a locked provider config elsewhere. Index: model_provider_configs_pkey.
update model_provider_configs
set base_url = $2, request_path = $3, auth_kind = $4, auth_header = $5, secret_id = $6, request_timeout_ms = $7,
    updated_at = statement_timestamp()
where id = $1;

-- name: has_models
-- Whether a locked provider config has configured models. Index: configured_models_name.
select exists (select from configured_models where provider_config_id = $1 and deleted_at is null) as has;

-- name: mark_provider_deleted
-- Hide a provider config and part it from its key. Index: model_provider_configs_pkey.
update model_provider_configs set deleted_at = statement_timestamp(), secret_id = null where id = $1;

-- name: find_model
-- A configured model as it is shown. Index: configured_models_pkey.
select m.id, m.org_id, m.provider_config_id, m.name, p.name as provider_config, p.origin, p.api_format,
       m.current_revision_id, m.created_at, m.updated_at, r.created_at as revision_created_at,
       r.provider_model_slug, r.context_window_tokens, r.max_output_tokens, r.default_max_output_tokens,
       r.default_cache_retention, r.supports_tools, r.supports_reasoning, r.default_reasoning_effort,
       r.supported_reasoning_efforts, r.input_modalities, r.output_modalities, r.api_variant_options
from configured_models m
join model_provider_configs p on p.id = m.provider_config_id and p.deleted_at is null
join configured_model_revisions r on r.id = m.current_revision_id
where m.org_id = $1 and m.id = $2 and m.deleted_at is null;

-- name: model_by_name
-- A configured model of a provider by name. Index: configured_models_name.
select id from configured_models where provider_config_id = $1 and name = $2 and deleted_at is null;

-- name: count_models
-- How many configured models an organization has.
select count(*)::integer from configured_models where org_id = $1 and deleted_at is null;

-- name: lock_model
-- Lock a configured model against parallel revisions, grants and deletion. Index: configured_models_pkey.
select id from configured_models where org_id = $1 and id = $2 and deleted_at is null for update;

-- name: list_models
-- The models of a provider config, newest first, after a (time, id) key. Index: configured_models_name.
select m.id, m.org_id, m.provider_config_id, m.name, p.name as provider_config, p.origin, p.api_format,
       m.current_revision_id, m.created_at, m.updated_at, r.created_at as revision_created_at,
       r.provider_model_slug, r.context_window_tokens, r.max_output_tokens, r.default_max_output_tokens,
       r.default_cache_retention, r.supports_tools, r.supports_reasoning, r.default_reasoning_effort,
       r.supported_reasoning_efforts, r.input_modalities, r.output_modalities, r.api_variant_options
from configured_models m
join model_provider_configs p on p.id = m.provider_config_id
join configured_model_revisions r on r.id = m.current_revision_id
where m.provider_config_id = $1 and m.deleted_at is null
  and ($2::timestamptz is null or (m.created_at, m.id) < ($2, $3::uuid))
order by m.created_at desc, m.id desc limit $4;

-- name: rename_model
-- Give a locked configured model another name. Index: configured_models_name.
update configured_models set name = $2, updated_at = statement_timestamp() where id = $1;

-- name: has_grants
-- Whether any project may use a locked configured model. Index: project_model_grants_model.
select exists (
  select from project_model_grants g join projects p on p.id = g.project_id and p.deleted_at is null
  where g.configured_model_id = $1) as has;

-- name: mark_model_deleted
-- Hide a configured model. Index: configured_models_pkey.
update configured_models set deleted_at = statement_timestamp(), updated_at = statement_timestamp() where id = $1;

-- name: add_grant
-- Let a project use a model within limits; no row when it may already. Index: unique key of grants.
insert into project_model_grants (id, project_id, configured_model_id, context_window_tokens, max_output_tokens,
                                  default_max_output_tokens, default_cache_retention, supports_tools, supports_reasoning,
                                  default_reasoning_effort, supported_reasoning_efforts, input_modalities,
                                  output_modalities)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
on conflict (project_id, configured_model_id) do nothing returning id;

-- name: find_grant
-- A project's grant by id ($2) or by model ($3). Index: project_model_grants_pkey, unique key of grants.
select g.id, g.project_id, g.configured_model_id, g.created_at, g.updated_at,
       g.context_window_tokens, g.max_output_tokens, g.default_max_output_tokens, g.default_cache_retention,
       g.supports_tools, g.supports_reasoning, g.default_reasoning_effort, g.supported_reasoning_efforts,
       g.input_modalities, g.output_modalities
from project_model_grants g
join configured_models m on m.id = g.configured_model_id and m.deleted_at is null
where g.project_id = $1 and (g.id = $2::uuid or g.configured_model_id = $3::uuid);

-- name: change_grant
-- Replace the limits of a grant. Index: project_model_grants_pkey.
update project_model_grants
set context_window_tokens = $2, max_output_tokens = $3, default_max_output_tokens = $4, default_cache_retention = $5,
    supports_tools = $6, supports_reasoning = $7, default_reasoning_effort = $8, supported_reasoning_efforts = $9,
    input_modalities = $10, output_modalities = $11, updated_at = statement_timestamp()
where id = $1;

-- name: drop_grant
-- Take a model from a project. Index: project_model_grants_pkey.
delete from project_model_grants where project_id = $1 and id = $2 returning id;

-- name: list_grants
-- The models that a project may use, with limits. Index: unique key of grants.
select l.* from (
  select case $1::text when 'name' then m.name
              else to_char(case $1::text when 'updated_at' then g.updated_at else g.created_at end at time zone 'UTC',
                           'YYYY-MM-DD"T"HH24:MI:SS.US') end collate "C" as key,
         g.id, g.project_id, g.configured_model_id, g.created_at, g.updated_at,
         g.context_window_tokens, g.max_output_tokens, g.default_max_output_tokens, g.default_cache_retention,
         g.supports_tools, g.supports_reasoning, g.default_reasoning_effort, g.supported_reasoning_efforts,
         g.input_modalities, g.output_modalities,
         m.org_id, m.provider_config_id, m.name, p.name as provider_config, m.created_at as model_created_at,
         m.updated_at as model_updated_at
  from project_model_grants g
  join configured_models m on m.id = g.configured_model_id and m.deleted_at is null
  join model_provider_configs p on p.id = m.provider_config_id and p.deleted_at is null
  where g.project_id = $7) l
where ($3::text is null or l.name ilike $3)
  and ($4::text is null or case when $2::boolean then (l.key, l.id) < ($4, $5::uuid) else (l.key, l.id) > ($4, $5) end)
order by case when $2 then l.key end desc, case when $2 then l.id end desc, l.key, l.id limit $6;
