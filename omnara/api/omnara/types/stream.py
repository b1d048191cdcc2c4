"""Payloads of the event stream's frames other than durable events. Source: api.md §11."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from omnara.api.omnara.types.events import AgentEvent
from omnara.api.omnara.types.scalars import (
    AgentCount,
    AgentSequence,
    AgentTurnID,
    ModelCallContextID,
    ModelStopReason,
    Natural,
    ToolCallID,
    ToolCallState,
    Wire,
)
from omnara.api.types import Error


class ToolCallUpdate(Wire, frozen=True, kw_only=True):
    """A tool call changed its state; best effort."""

    tool_call_id: ToolCallID
    state: ToolCallState


class ModelOutputTextStreamBlock(Wire, frozen=True, kw_only=True, tag="text", tag_field="kind"):
    """A block of text begins."""


class ModelOutputThinkingStreamBlock(Wire, frozen=True, kw_only=True, tag="thinking", tag_field="kind"):
    """A block of reasoning begins."""


class ModelOutputToolUseStreamBlock(Wire, frozen=True, kw_only=True, tag="tool_use", tag_field="kind"):
    """A tool call begins; its id is the later durable one."""

    tool_call_id: ToolCallID
    tool_name: str


ModelOutputStreamBlock = ModelOutputTextStreamBlock | ModelOutputThinkingStreamBlock | ModelOutputToolUseStreamBlock


class ModelOutputBlockStartDelta(Wire, frozen=True, kw_only=True, tag="block_start", tag_field="kind"):
    """A block begins."""

    block_index: Natural
    block: ModelOutputStreamBlock


class ModelOutputTextDelta(Wire, frozen=True, kw_only=True, tag="text_delta", tag_field="kind"):
    """More text."""

    block_index: Natural
    delta: str


class ModelOutputThinkingDelta(Wire, frozen=True, kw_only=True, tag="thinking_delta", tag_field="kind"):
    """More reasoning."""

    block_index: Natural
    delta: str


class ModelOutputToolArgumentsDelta(Wire, frozen=True, kw_only=True, tag="tool_arguments_delta", tag_field="kind"):
    """More of a tool call's arguments, as JSON text in pieces."""

    block_index: Natural
    delta: str


class ModelOutputBlockStopDelta(Wire, frozen=True, kw_only=True, tag="block_stop", tag_field="kind"):
    """A block is complete."""

    block_index: Natural


class ModelUsage(Wire, frozen=True, kw_only=True):
    """Tokens as the provider counted them."""

    input_tokens_total: Natural | UnsetType = UNSET
    uncached_input_tokens: Natural | UnsetType = UNSET
    output_tokens_total: Natural | UnsetType = UNSET
    reasoning_output_tokens: Natural | UnsetType = UNSET
    cache_read_input_tokens: Natural | UnsetType = UNSET
    cache_write_input_tokens: Natural | UnsetType = UNSET


class MessageStop(Wire, frozen=True, kw_only=True):
    """Why the model stopped."""

    reason: ModelStopReason
    usage: ModelUsage


class ModelOutputMessageStopDelta(Wire, frozen=True, kw_only=True, tag="message_stop", tag_field="kind"):
    """The model's answer is complete; the durable event follows."""

    stop: MessageStop


class StreamFault(Wire, frozen=True, kw_only=True):
    """What went wrong in a model call that may be tried again."""

    message: str


class ModelOutputErrorDelta(Wire, frozen=True, kw_only=True, tag="error", tag_field="kind"):
    """The attempt failed; another may follow under another id."""

    error: StreamFault


ModelOutputStreamDelta = (
    ModelOutputBlockStartDelta
    | ModelOutputTextDelta
    | ModelOutputThinkingDelta
    | ModelOutputToolArgumentsDelta
    | ModelOutputBlockStopDelta
    | ModelOutputMessageStopDelta
    | ModelOutputErrorDelta
)


class ModelOutputDelta(Wire, frozen=True, kw_only=True):
    """The envelope of a delta: whose it is, and which of the model call's deltas it covers."""

    turn_id: AgentTurnID
    model_call_context_id: ModelCallContextID
    seq: AgentSequence
    source_seq_start: AgentSequence
    source_seq_end: AgentSequence
    coalesced_count: AgentCount
    event: ModelOutputStreamDelta


AgentEventStreamData = (AgentEvent, ToolCallUpdate, ModelOutputDelta, Error)
"""What a frame may carry: an event, or one of these previews and notices."""
