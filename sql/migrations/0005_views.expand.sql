-- For analysts: flat, readable, no ids to join by hand.
create view agents_overview as
select a.id as agent_id, a.org_id, a.project_id, a.name, a.created_at,
       case when s.gate = 'archived' then 'archived'
            when s.gate = 'crashed' then 'crashed'
            when s.gate = 'paused' and s.worker_id is not null then 'pausing'
            when s.gate = 'paused' then 'paused'
            when s.worker_id is not null or s.ready_at is not null then 'running'
            when s.open_calls > 0 then 'waiting'
            else 'idle' end as status,
       m.name as model, (c.definition ->> 'temperature')::float8 as temperature,
       c.definition ->> 'instruction' as system_prompt,
       s.step_number as last_step, s.next_sequence - 1 as last_sequence, s.turn_sequence as turns,
       s.open_calls, s.ready_at, s.worker_id, s.deaths, a.updated_at, a.archived_at
from agents a
join agent_sched s on s.agent_id = a.id
join agent_configs c on c.id = a.current_config_id
join configured_models m on m.id = c.configured_model_id;

create view agent_steps as
select st.agent_id, st.number as step, st.started_at as "timestamp", st.finished_at, st.kind, st.attempt,
       st.state as status, calls.tool_request, calls.tool_response,
       (select e.payload -> 'content_blocks' from events e
         where st.kind = 'model' and e.agent_id = st.agent_id and e.sequence = st.output_sequence) as llm_output,
       st.next_action, st.secrets_used, st.error, st.usage
from steps st
left join lateral (
  select json_agg(json_build_object('tool_call_id', t.id, 'name', t.name, 'input', t.input, 'state', t.state,
                                    'outcome', t.outcome) order by t.ordinal) as tool_request,
         json_agg(r.payload order by t.ordinal) filter (
           where r.payload is not null and (st.kind = 'tools' or t.step_number is null)) as tool_response
    from tool_calls t
    left join events r on r.agent_id = t.agent_id and r.sequence = t.result_sequence
   where t.agent_id = st.agent_id and t.output_sequence = st.output_sequence
     and (st.kind = 'model' or t.step_number = st.number)
) calls on true;
comment on view agent_steps is
  'A model step shows what it asked for and the answers that came from outside; a tools step shows the calls that it ran.';
