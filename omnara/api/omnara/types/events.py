"""The four kinds of event, and the pages in which they are listed.

Events are served from their stored JSON text (`omnara.api.event_json`); these structs describe the result to the
OpenAPI document and to tests. List responses carry the ready-made text as `Raw`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.blocks import AgentInputContentBlock, ModelOutputContentBlock, ToolResultContentBlock
from omnara.api.omnara.types.scalars import (
    ActorID,
    AgentConfigID,
    AgentControlType,
    AgentCount,
    AgentEventID,
    AgentID,
    AgentInputID,
    AgentInputKind,
    AgentInteractionID,
    AgentSequence,
    AgentSequenceCursor,
    AgentTurnID,
    ContextCheckpointID,
    ModelCallContextID,
    ModelOutputStopReason,
    OrganizationID,
    ProjectID,
    Timestamp,
    ToolCallID,
    ToolCallOutcome,
    Wire,
)

NeverOpens = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]
"""Only inputs open turns."""


class EventFields(Wire, frozen=True, kw_only=True, tag_field="event_kind"):
    """What every event carries. Source: api.md §10."""

    id: AgentEventID
    org_id: OrganizationID
    project_id: ProjectID
    agent_id: AgentID
    turn_id: AgentTurnID
    turn_sequence: AgentSequence
    sequence: AgentSequence
    created_at: Timestamp


class AgentInputEvent(EventFields, frozen=True, kw_only=True, tag="agent_input"):
    """A message, control, answer or config change that entered the log."""

    is_opening_event: bool
    agent_input_id: AgentInputID
    input_kind: AgentInputKind
    actor_id: ActorID | UnsetType = UNSET
    input_idempotency_key: str | UnsetType = UNSET
    control_type: AgentControlType | UnsetType = UNSET
    interaction_id: AgentInteractionID | UnsetType = UNSET
    agent_config_id: AgentConfigID | UnsetType = UNSET
    content_blocks: list[AgentInputContentBlock]


class ModelOutputEvent(EventFields, frozen=True, kw_only=True, tag="model_output"):
    """What the model answered."""

    is_opening_event: NeverOpens
    model_call_context_id: ModelCallContextID
    stop_reason: ModelOutputStopReason
    content_blocks: list[ModelOutputContentBlock]


class ToolResultEvent(EventFields, frozen=True, kw_only=True, tag="tool_result"):
    """The one result of a tool call."""

    is_opening_event: NeverOpens
    tool_call_id: ToolCallID
    outcome: ToolCallOutcome
    content_blocks: list[ToolResultContentBlock]


class ContextCheckpointEvent(EventFields, frozen=True, kw_only=True, tag="context_checkpoint"):
    """A summary of everything before it."""

    is_opening_event: NeverOpens
    context_checkpoint_id: ContextCheckpointID
    summarized_through_event_sequence: AgentSequence
    summary: str


AgentEvent = AgentInputEvent | ModelOutputEvent | ToolResultEvent | ContextCheckpointEvent


class ListAgentEventsResponse(Wire, frozen=True, kw_only=True):
    """A page of the log. `next_before_sequence` is absent going forward and null at the start of the log."""

    data: list[AgentEvent]
    next_after_sequence: AgentSequenceCursor
    next_before_sequence: AgentSequenceCursor | UnsetType | None = UNSET
    has_more: bool


class ListTurnEventsResponse(Wire, frozen=True, kw_only=True):
    """A page of one turn's events."""

    data: list[AgentEvent]
    next_before_sequence: AgentSequenceCursor | None


class AgentTurn(Wire, frozen=True, kw_only=True):
    """A turn with the events that begin and end it."""

    id: AgentTurnID
    agent_id: AgentID
    turn_sequence: AgentSequence
    event_count: AgentCount
    opening_events: list[AgentEvent]
    latest_event: AgentEvent | UnsetType = UNSET
    latest_semantic_event: AgentEvent | UnsetType = UNSET
    started_at: Timestamp
    updated_at: Timestamp


class ListAgentTurnsResponse(Wire, frozen=True, kw_only=True):
    """A page of turns, newest first."""

    data: list[AgentTurn]
    next_before_turn_sequence: AgentSequenceCursor | None
