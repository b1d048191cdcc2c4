"""Routes of agent configs: create, get, and change the config of a live agent."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.omnara import encode
from omnara.api.omnara.decode import AGENT, AGENT_PATH, PROJECT, PROJECT_PATH, agent_path, id_in_body, project_scope
from omnara.api.omnara.types.agents import (
    AgentConfig,
    AgentConfigModel,
    CreateAgentConfigRequest,
    UpdateAgentConfigRequest,
    UpdateAgentConfigResponse,
    Warning,
)
from omnara.api.routing import Call, Route, reply
from omnara.engine import config_change, configs
from omnara.engine.configs import COMPILER_VERSION, ConfigView
from omnara.ids import IdKind
from omnara.ids import encode as public_id


def agent_config(view: ConfigView) -> AgentConfig:
    """A config with its source, and its model's limits as they are now. Source: api.md §9."""
    row = view.row
    source_format: Any = row.source_format
    return AgentConfig(
        id=public_id(IdKind.AGENT_CONFIG, row.id),
        org_id=public_id(IdKind.ORG, row.org_id),
        project_id=public_id(IdKind.PROJECT, row.project_id),
        source=row.source,
        source_format=source_format,
        compiler_version=COMPILER_VERSION,
        effective_definition_hash=row.definition_hash,
        model=_model(view),
        instruction_hash=row.instruction_hash,
        warnings=_warnings(view),
        created_at=row.created_at,
    )


def _warnings(view: ConfigView) -> list[Warning] | UnsetType:
    missing = view.missing_machine_tools
    if not missing:
        return UNSET
    text = f"The config has machines, but not the tools {', '.join(missing)}."
    return [Warning(message=text, code="missing_recommended_machine_tools")]


def _model(view: ConfigView) -> AgentConfigModel:
    model, limits = view.model, view.limits
    api_format: Any = model.api_format.replace("_", "-")
    cache_retention: Any = limits.cache_retention
    return AgentConfigModel(
        provider_config=model.provider_config,
        name=model.name,
        provider_model_slug=model.provider_model_slug,
        configured_model_id=public_id(IdKind.CONFIGURED_MODEL, model.configured_model_id),
        current_revision_id=public_id(IdKind.MODEL_REVISION, model.revision_id),
        api_format=api_format,
        api_variant=model.api_variant,
        context_window_tokens=limits.context_window_tokens,
        max_output_tokens=limits.max_output_tokens,
        default_max_output_tokens=limits.default_max_output_tokens,
        default_cache_retention=cache_retention,
        supports_tools=model.supports_tools,
        supports_reasoning=model.supports_reasoning,
        default_reasoning_effort=limits.reasoning_effort,
        supported_reasoning_efforts=model.supported_reasoning_efforts,
        input_modalities=model.input_modalities,
        output_modalities=model.output_modalities,
    )


async def create_config(call: Call) -> web.StreamResponse:
    """Compile and store a config: 201 for a new one, 200 for the same words again."""
    body: CreateAgentConfigRequest = call.body
    made = await configs.create_config(
        call.context.deps, call.principal, project_scope(call), body.source, body.source_format
    )
    return reply(201 if made.created else 200, agent_config(made.config))


async def get_config(call: Call) -> web.StreamResponse:
    """One config."""
    view = await configs.get_config(call.context.deps, call.principal, project_scope(call), call.ids["agentConfigID"])
    return reply(200, agent_config(view))


async def update_config(call: Call) -> web.StreamResponse:
    """Give a live agent another config."""
    body: UpdateAgentConfigRequest = call.body
    expected = body.expected_current_config_id
    changed = await config_change.change_agent_config(
        call.context.deps,
        call.principal,
        agent_path(call),
        body.source,
        body.source_format,
        expected_current_config_id=None if expected is UNSET else id_in_body(IdKind.AGENT_CONFIG, str(expected)),
        key=call.key,
    )
    return reply(
        200,
        UpdateAgentConfigResponse(
            agent_config=agent_config(changed.config),
            agent_input=encode.agent_input(changed.input),
            event_id=public_id(IdKind.EVENT, changed.event_id),
        ),
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=f"{PROJECT_PATH}/agent-configs",
        operation_id="createAgentConfig",
        handler=create_config,
        path_ids=PROJECT,
        body=CreateAgentConfigRequest,
        responses={200: AgentConfig, 201: AgentConfig},
    ),
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/agent-configs/{{agentConfigID}}",
        operation_id="getAgentConfig",
        handler=get_config,
        path_ids={**PROJECT, "agentConfigID": IdKind.AGENT_CONFIG},
        responses={200: AgentConfig},
    ),
    Route(
        method="POST",
        path=f"{AGENT_PATH}/config",
        operation_id="updateAgentConfig",
        handler=update_config,
        path_ids=AGENT,
        body=UpdateAgentConfigRequest,
        idempotent=True,
        responses={200: UpdateAgentConfigResponse},
    ),
)
