-- An agent has as many files as its log shows, or more: some wait in inputs.
with shown as (
  select e.agent_id, count(distinct block ->> 'artifact_id') as files
  from events e cross join lateral json_array_elements(e.payload -> 'content_blocks') as block
  where e.kind in ('agent_input', 'tool_result') and block ->> 'type' = 'media_ref'
  group by e.agent_id
)
select agent_id, files from shown
where files > (select count(*) from artifacts a where a.agent_id = shown.agent_id);
