-- name: granted_model
-- A configured model as a project may use it, with what the grant switches off; no `grant_id` without one.
-- Index: pkeys, unique key of grants.
select m.id as configured_model_id, m.name, p.id as provider_config_id, p.name as provider_config, p.origin,
       p.api_format, p.api_variant, p.base_url, p.request_path, p.auth_kind, p.auth_header, p.secret_id,
       p.request_timeout_ms, r.id as revision_id, r.provider_model_slug, r.context_window_tokens, r.max_output_tokens,
       r.default_max_output_tokens, r.default_cache_retention,
       r.supports_tools and coalesce(g.supports_tools, true) as supports_tools,
       r.supports_reasoning and coalesce(g.supports_reasoning, true) as supports_reasoning, r.default_reasoning_effort,
       case when cardinality(g.supported_reasoning_efforts) > 0 then g.supported_reasoning_efforts
            else r.supported_reasoning_efforts end as supported_reasoning_efforts,
       case when cardinality(g.input_modalities) > 0 then g.input_modalities else r.input_modalities end
         as input_modalities,
       case when cardinality(g.output_modalities) > 0 then g.output_modalities else r.output_modalities end
         as output_modalities,
       r.api_variant_options, g.id as grant_id, g.context_window_tokens as grant_context_window, g.max_output_tokens as grant_max_output,
       g.default_max_output_tokens as grant_default_max_output, g.default_cache_retention as grant_cache_retention,
       g.default_reasoning_effort as grant_reasoning_effort
from configured_models m
join model_provider_configs p on p.id = m.provider_config_id
join configured_model_revisions r on r.id = m.current_revision_id
left join project_model_grants g on g.configured_model_id = m.id and g.project_id = $2
where m.id = $1;

-- name: model_by_names
-- A configured model by the names a config uses, grant or none. Index: unique names.
select m.id as configured_model_id, m.name, p.id as provider_config_id, p.name as provider_config, p.origin,
       p.api_format, p.api_variant, p.base_url, p.request_path, p.auth_kind, p.auth_header, p.secret_id,
       p.request_timeout_ms, r.id as revision_id, r.provider_model_slug, r.context_window_tokens, r.max_output_tokens,
       r.default_max_output_tokens, r.default_cache_retention,
       r.supports_tools and coalesce(g.supports_tools, true) as supports_tools,
       r.supports_reasoning and coalesce(g.supports_reasoning, true) as supports_reasoning, r.default_reasoning_effort,
       case when cardinality(g.supported_reasoning_efforts) > 0 then g.supported_reasoning_efforts
            else r.supported_reasoning_efforts end as supported_reasoning_efforts,
       case when cardinality(g.input_modalities) > 0 then g.input_modalities else r.input_modalities end
         as input_modalities,
       case when cardinality(g.output_modalities) > 0 then g.output_modalities else r.output_modalities end
         as output_modalities,
       r.api_variant_options, g.id as grant_id, g.context_window_tokens as grant_context_window, g.max_output_tokens as grant_max_output,
       g.default_max_output_tokens as grant_default_max_output, g.default_cache_retention as grant_cache_retention,
       g.default_reasoning_effort as grant_reasoning_effort
from model_provider_configs p
join configured_models m on m.provider_config_id = p.id and m.deleted_at is null
join configured_model_revisions r on r.id = m.current_revision_id
left join project_model_grants g on g.configured_model_id = m.id and g.project_id = $4
where p.org_id = $1 and p.name = $2 and m.name = $3 and p.deleted_at is null;

-- name: granted_names
-- The models that a project may use, by provider and name. Index: unique key of grants.
select p.name as provider_config, m.name, r.provider_model_slug
from project_model_grants g
join configured_models m on m.id = g.configured_model_id and m.deleted_at is null
join model_provider_configs p on p.id = m.provider_config_id and p.deleted_at is null
join configured_model_revisions r on r.id = m.current_revision_id
where g.project_id = $1
order by p.name, m.name;

-- name: find_provider
-- A provider config by name. Index: model_provider_configs_name.
select id, org_id, name, api_format, base_url, request_path, auth_kind, auth_header, secret_id, origin
from model_provider_configs where org_id = $1 and name = $2 and deleted_at is null;

-- name: insert_provider
-- A provider config.
insert into model_provider_configs (id, org_id, name, preset, api_format, base_url, request_path, auth_kind, secret_id, origin)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: update_provider
-- Move an environment provider to what the environment says now. Index: model_provider_configs_pkey.
update model_provider_configs
set base_url = $2, request_path = $3, secret_id = $4, api_format = $5, auth_kind = $6, updated_at = statement_timestamp()
where id = $1
  and (base_url, request_path, api_format, auth_kind) is distinct from ($2, $3, $5, $6)
   or id = $1 and secret_id is distinct from $4;

-- name: find_model
-- A configured model of a provider by name. Index: configured_models_name.
select id, current_revision_id from configured_models
where provider_config_id = $1 and name = $2 and deleted_at is null;

-- name: insert_model
-- A configured model, to be pointed at its first revision in the same transaction; no row when the name is taken.
insert into configured_models (id, org_id, provider_config_id, name, current_revision_id) values ($1, $2, $3, $4, $5)
on conflict (provider_config_id, name) where deleted_at is null do nothing returning id;

-- name: insert_revision
-- The facts of a configured model, as its next revision.
insert into configured_model_revisions (
  id, configured_model_id, revision, provider_model_slug, context_window_tokens, max_output_tokens,
  default_max_output_tokens, default_cache_retention, supports_tools, supports_reasoning, default_reasoning_effort,
  supported_reasoning_efforts, input_modalities, output_modalities, api_variant_options)
select $1, $2, coalesce(max(r.revision), 0) + 1, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14::json
from configured_model_revisions r where r.configured_model_id = $2;

-- name: current_revision
-- The facts of a configured model now. Index: configured_model_revisions_pkey.
select r.provider_model_slug, r.context_window_tokens, r.max_output_tokens, r.default_max_output_tokens,
       r.default_cache_retention, r.supports_tools, r.supports_reasoning, r.default_reasoning_effort,
       r.supported_reasoning_efforts, r.input_modalities, r.output_modalities, r.api_variant_options
from configured_models m join configured_model_revisions r on r.id = m.current_revision_id
where m.id = $1;

-- name: set_current_revision
-- Point a configured model at a revision. Index: configured_models_pkey.
update configured_models set current_revision_id = $2, updated_at = statement_timestamp() where id = $1;

-- name: grant_to_project
-- Let a project use a model, if it may not yet. Index: unique key of grants.
insert into project_model_grants (id, project_id, configured_model_id) values ($1, $2, $3)
on conflict (project_id, configured_model_id) do nothing;

-- name: org_projects
-- Every project of an organization. Index: projects_newest.
select id from projects where org_id = $1 and deleted_at is null order by created_at, id;

-- name: list_models
-- The models of an organization for people. Index: configured_models_name.
select p.name as provider_config, m.name, r.provider_model_slug, p.api_format, p.base_url, p.origin,
       r.context_window_tokens, r.max_output_tokens, r.supports_tools, r.supports_reasoning,
       (select count(*) from project_model_grants g where g.configured_model_id = m.id)::integer as grants
from configured_models m
join model_provider_configs p on p.id = m.provider_config_id and p.deleted_at is null
join configured_model_revisions r on r.id = m.current_revision_id
where m.org_id = $1 and m.deleted_at is null order by p.name, m.name;
