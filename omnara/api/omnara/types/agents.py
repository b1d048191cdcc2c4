"""Configs, agents, inputs and controls."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.blocks import AgentInputContentBlock, CreateAgentInputContentBlock
from omnara.api.omnara.types.events import AgentEvent
from omnara.api.omnara.types.scalars import (
    ActorID,
    AgentConfigID,
    AgentEventID,
    AgentID,
    AgentInputDeliveryMode,
    AgentInputID,
    AgentInputKind,
    AgentMachineBindingID,
    AgentProfileID,
    ConfiguredModelID,
    ConfiguredModelRevisionID,
    CreateAgentInputDeliveryMode,
    MachineID,
    Metadata,
    ModelAPIFormat,
    ModelCacheRetention,
    NonEmpty,
    OrganizationID,
    ProjectID,
    SecretID,
    SourceFormat,
    Timestamp,
    Wire,
)


class CreateAgentConfigRequest(Wire, frozen=True, kw_only=True):
    """Source text of a config, stored verbatim."""

    source: NonEmpty
    source_format: SourceFormat


class AgentConfigModel(Wire, frozen=True, kw_only=True):
    """The model behind a config, with limits as they are now."""

    provider_config: str
    name: str
    provider_model_slug: str
    configured_model_id: ConfiguredModelID
    current_revision_id: ConfiguredModelRevisionID
    api_format: ModelAPIFormat
    api_variant: str
    context_window_tokens: int
    max_output_tokens: int
    default_max_output_tokens: int | UnsetType | None = UNSET
    default_cache_retention: ModelCacheRetention
    supports_tools: bool
    supports_reasoning: bool
    default_reasoning_effort: str
    supported_reasoning_efforts: list[str]
    input_modalities: list[str]
    output_modalities: list[str]


class Warning(Wire, frozen=True, kw_only=True):
    """A remark about a config that does not stop it."""

    message: str
    code: Literal["missing_recommended_machine_tools"]


class AgentConfig(Wire, frozen=True, kw_only=True):
    """An immutable compiled config."""

    id: AgentConfigID
    org_id: OrganizationID
    project_id: ProjectID
    source: str | UnsetType = UNSET
    source_format: SourceFormat | UnsetType = UNSET
    compiler_version: str | UnsetType = UNSET
    effective_definition_hash: str
    model: AgentConfigModel
    instruction_hash: str | UnsetType = UNSET
    warnings: Annotated[list[Warning], Meta(min_length=1)] | UnsetType = UNSET
    created_at: Timestamp


class CreateAgentRequest(Wire, frozen=True, kw_only=True):
    """Launch an agent, with its first message or without."""

    profile: AgentProfileID | UnsetType = UNSET
    config: AgentConfigID
    name: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class IntegrationTarget(Wire, frozen=True, kw_only=True):
    """Where an agent was launched from, outside."""

    provider: str
    provider_ref: str
    provider_ref_kind: str
    display_name: str
    provider_uri: Annotated[str, Meta(extra_json_schema={"format": "uri"})] | UnsetType = UNSET


class AgentModel(Wire, frozen=True, kw_only=True):
    """The names of an agent's model."""

    provider_config: str
    name: str


class Agent(Wire, frozen=True, kw_only=True):
    """An agent."""

    id: AgentID
    org_id: OrganizationID
    project_id: ProjectID
    agent_profile_id: AgentProfileID | UnsetType = UNSET
    state: Literal["active", "archived"]
    name: str
    integration_target: IntegrationTarget | UnsetType = UNSET
    current_config_id: AgentConfigID | UnsetType = UNSET
    model: AgentModel | UnsetType = UNSET
    created_at: Timestamp
    updated_at: Timestamp
    archived_at: Timestamp | UnsetType = UNSET


class AgentMachineBinding(Wire, frozen=True, kw_only=True):
    """A machine attached to an agent."""

    id: AgentMachineBindingID
    project_id: ProjectID
    agent_id: AgentID
    machine_id: MachineID
    machine_ref: str
    binding_kind: Literal["explicit", "pool"]
    state: Literal["attached", "released"]
    description: str
    cwd: str
    env_overlay: dict[str, str | None]
    secret_env_overlay: dict[str, SecretID | None]
    created_at: Timestamp
    updated_at: Timestamp


class AgentInput(Wire, frozen=True, kw_only=True):
    """An input, waiting or admitted."""

    id: AgentInputID
    agent_id: AgentID
    state: str
    delivery_mode: AgentInputDeliveryMode
    input_kind: AgentInputKind
    actor_id: ActorID | UnsetType = UNSET
    content_blocks: list[AgentInputContentBlock] | UnsetType = UNSET
    queued_at: Timestamp


class AgentInputEnvelope(Wire, frozen=True, kw_only=True):
    """One input."""

    agent_input: AgentInput


class LaunchAgentResponse(Wire, frozen=True, kw_only=True):
    """A new agent."""

    agent: Agent
    agent_config: AgentConfig
    machine_bindings: list[AgentMachineBinding]
    agent_input: AgentInput | UnsetType = UNSET


class CurrentAgentResponse(Wire, frozen=True, kw_only=True):
    """An agent as it is now."""

    agent: Agent


class AgentMCPConnection(Wire, frozen=True, kw_only=True):
    """A connection of an agent to an MCP server."""

    server_key: str
    endpoint_url: str
    state: Literal["initializing", "ready", "failed", "expired"]
    protocol_version: str | UnsetType = UNSET
    initialize_error: str
    created_at: Timestamp
    updated_at: Timestamp


class GetAgentResponse(Wire, frozen=True, kw_only=True):
    """An agent with what is attached to it."""

    agent: Agent
    machine_ids: list[MachineID]
    mcp_connections: list[AgentMCPConnection]


class ListAgentsResponse(Wire, frozen=True, kw_only=True):
    """A page of active agents."""

    data: list[Agent]
    next_cursor: str | None


class UpdateAgentConfigRequest(Wire, frozen=True, kw_only=True):
    """A new config for a live agent, optionally only if it still runs the expected one."""

    source: NonEmpty
    source_format: SourceFormat
    expected_current_config_id: AgentConfigID | UnsetType = UNSET


class UpdateAgentConfigResponse(Wire, frozen=True, kw_only=True):
    """The new config and the input and event that carry it."""

    agent_config: AgentConfig
    agent_input: AgentInput
    event_id: AgentEventID


class ExternalActorParams(Wire, frozen=True, kw_only=True):
    """Somebody outside on whose behalf an org key acts."""

    provider_tenant_id: Annotated[str, Meta(min_length=1, max_length=128)] | UnsetType = UNSET
    provider_user_id: Annotated[str, Meta(min_length=1, max_length=128)]
    display_name: Annotated[str, Meta(max_length=256)] | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class CancelAgentRequest(Wire, frozen=True, kw_only=True):
    """Cancel what runs."""

    actor: ExternalActorParams | UnsetType = UNSET


class CancelAgentResponse(Wire, frozen=True, kw_only=True):
    """Whether anything was cancelled, and the control event if so."""

    event: AgentEvent | None
    runtime_cancel_requested: bool
    affected: bool
    actor_id: ActorID | UnsetType = UNSET


class CreateAgentInputRequest(Wire, frozen=True, kw_only=True):
    """A message for an agent."""

    content_blocks: list[CreateAgentInputContentBlock]
    delivery_mode: CreateAgentInputDeliveryMode | UnsetType = UNSET
    cancel_open_interactions: bool | UnsetType = UNSET
    actor: ExternalActorParams | UnsetType = UNSET
