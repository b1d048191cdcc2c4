"""Tool calls, their results, and the questions that people answer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.agents import ExternalActorParams
from omnara.api.omnara.types.blocks import SubmitToolResultContentBlock, ToolResultContentBlock
from omnara.api.omnara.types.scalars import (
    AgentEventID,
    AgentID,
    AgentInputID,
    AgentInteractionID,
    AgentInteractionKind,
    AgentInteractionState,
    AgentTurnID,
    JSONObject,
    Natural,
    NonEmpty,
    OrganizationID,
    ProjectID,
    Timestamp,
    ToolCallID,
    ToolCallOutcome,
    ToolCallState,
    ToolCallType,
    Wire,
)


class ToolCall(Wire, frozen=True, kw_only=True):
    """A tool call with its current state."""

    id: ToolCallID
    turn_id: AgentTurnID
    provider_call_id: str
    name: str
    input: JSONObject
    type: ToolCallType
    state: ToolCallState
    outcome: ToolCallOutcome | UnsetType = UNSET
    completed_at: Timestamp | UnsetType = UNSET
    created_at: Timestamp


class ListToolCallsResponse(Wire, frozen=True, kw_only=True):
    """A page of tool calls, oldest first."""

    data: list[ToolCall]
    next_cursor: str | None


class SubmitToolCallResultRequest(Wire, frozen=True, kw_only=True):
    """The result of a custom tool call."""

    outcome: Literal["succeeded", "failed"]
    content_blocks: list[SubmitToolResultContentBlock]


class ToolResult(Wire, frozen=True, kw_only=True):
    """The result as it entered the log."""

    event_id: AgentEventID
    agent_id: AgentID
    tool_call_id: ToolCallID
    outcome: ToolCallOutcome
    content_blocks: list[ToolResultContentBlock]
    created_at: Timestamp


class SubmitToolCallResultResponse(Wire, frozen=True, kw_only=True):
    """The completed call and its result."""

    tool_call: ToolCall
    tool_result: ToolResult


class InteractionFormContextItem(Wire, frozen=True, kw_only=True):
    """Something that helps to answer."""

    label: NonEmpty
    value: NonEmpty


class InteractionFormOption(Wire, frozen=True, kw_only=True):
    """One possible answer."""

    label: NonEmpty
    allows_text: bool = False


class InteractionFormQuestion(Wire, frozen=True, kw_only=True):
    """One question with its options."""

    prompt: NonEmpty
    multiple: bool = False
    options: Annotated[list[InteractionFormOption], Meta(min_length=1)]


class InteractionForm(Wire, frozen=True, kw_only=True):
    """What is asked."""

    title: NonEmpty
    context: list[InteractionFormContextItem] | UnsetType = UNSET
    questions: Annotated[list[InteractionFormQuestion], Meta(min_length=1)]


class InteractionAnswer(Wire, frozen=True, kw_only=True):
    """The answer to one question."""

    option_indices: Annotated[list[Natural], Meta(min_length=1, extra_json_schema={"uniqueItems": True})]
    text: str | UnsetType = UNSET


class InteractionResolution(Wire, frozen=True, kw_only=True):
    """The answers to all questions."""

    answers: Annotated[list[InteractionAnswer], Meta(min_length=1)]


class AgentInteraction(Wire, frozen=True, kw_only=True):
    """A permission or question that waits for a person, or did."""

    id: AgentInteractionID
    org_id: OrganizationID
    project_id: ProjectID
    agent_id: AgentID
    interaction_kind: AgentInteractionKind
    state: AgentInteractionState
    request: InteractionForm
    resolution: InteractionResolution | UnsetType = UNSET
    resolved_by_input_id: AgentInputID | UnsetType = UNSET
    created_at: Timestamp
    resolved_at: Timestamp | UnsetType = UNSET


class ListAgentInteractionsResponse(Wire, frozen=True, kw_only=True):
    """A page of interactions, oldest first."""

    data: list[AgentInteraction]
    next_cursor: str | None


class ResolveAgentInteractionRequest(Wire, frozen=True, kw_only=True):
    """Answers, one per question."""

    answers: Annotated[list[InteractionAnswer], Meta(min_length=1)]
    actor: ExternalActorParams | UnsetType = UNSET
