-- What organizations set up by API beyond what the environment needs: key headers, variant options, narrower grants,
-- who made a key. A second active project of one name has had no way to come into being before this.
alter table model_provider_configs add column auth_header text;
alter table configured_model_revisions add column api_variant_options json not null default '{}';
alter table project_model_grants
  add column supports_tools boolean,
  add column supports_reasoning boolean,
  add column supported_reasoning_efforts text[] not null default '{}',
  add column input_modalities text[] not null default '{}',
  add column output_modalities text[] not null default '{}';
alter table org_api_keys add column created_by_user_id uuid references users;

create unique index projects_name on projects (org_id, name) where deleted_at is null;
create index model_provider_configs_secret on model_provider_configs (secret_id) where deleted_at is null;
create index project_model_grants_model on project_model_grants (configured_model_id);
create index secret_grants_project on secret_grants (project_id);
create index org_api_keys_newest on org_api_keys (org_id, created_at desc, id desc);
create index org_api_key_projects_project on org_api_key_projects (project_id);

-- Which kinds of input a model takes was never asked for so far; an empty list says that nobody stated it.
alter table configured_model_revisions alter column input_modalities set default '{}';
alter table configured_model_revisions alter column output_modalities set default '{}';
update configured_model_revisions set input_modalities = '{}' where input_modalities = '{text}';
update configured_model_revisions set output_modalities = '{}' where output_modalities = '{text}';
