"""What a model says while it says it: the preview frames that clients see, in the shape of the public contract.

Every wire format is translated into these few structs as its bytes arrive. They are a preview only: nothing durable is
ever built from them, so a lost one costs a reader some characters and the log nothing.
Source: contract schemas ModelOutputStreamDelta, ModelOutputStreamBlock, ModelUsage, ModelStopReason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

ModelStopReason = Literal[
    "end_turn", "tool_use", "max_tokens", "refusal", "content_filter", "pause", "context_window", "unknown"
]


class ModelUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts as far as the provider states them. Cached input is part of `input_tokens_total`."""

    input_tokens_total: int | None = None
    uncached_input_tokens: int | None = None
    output_tokens_total: int | None = None
    reasoning_output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_write_input_tokens: int | None = None


class _Kind(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of the unions below: the contract names their variants by `kind`."""


class TextStreamBlock(_Kind, frozen=True, tag="text"):
    """A text block opens."""


class ThinkingStreamBlock(_Kind, frozen=True, tag="thinking"):
    """A reasoning block opens."""


class ToolUseStreamBlock(_Kind, frozen=True, tag="tool_use"):
    """A tool call opens; `tool_call_id` is the public id that the durable call will have."""

    tool_call_id: str
    tool_name: str


class BlockStart(_Kind, frozen=True, tag="block_start"):
    """Block `block_index` (0, 1, 2, … within one attempt) opens."""

    block_index: int
    block: TextStreamBlock | ThinkingStreamBlock | ToolUseStreamBlock


class TextDelta(_Kind, frozen=True, tag="text_delta"):
    """More text of an open text block."""

    block_index: int
    delta: str


class ThinkingDelta(_Kind, frozen=True, tag="thinking_delta"):
    """More text of an open reasoning block."""

    block_index: int
    delta: str


class ToolArgumentsDelta(_Kind, frozen=True, tag="tool_arguments_delta"):
    """More of the JSON text of a call's arguments."""

    block_index: int
    delta: str


class BlockStop(_Kind, frozen=True, tag="block_stop"):
    """A block is complete."""

    block_index: int


class Stop(msgspec.Struct, frozen=True):
    """Why the attempt ended, and what it used."""

    reason: ModelStopReason
    usage: ModelUsage


class MessageStop(_Kind, frozen=True, tag="message_stop"):
    """The attempt is complete."""

    stop: Stop


class StreamFault(msgspec.Struct, frozen=True):
    """What a reader may know about a failed attempt."""

    message: str


class ErrorDelta(_Kind, frozen=True, tag="error"):
    """The attempt failed; what was previewed so far is void."""

    error: StreamFault


StreamDelta = BlockStart | TextDelta | ThinkingDelta | ToolArgumentsDelta | BlockStop | MessageStop | ErrorDelta

Sink = Callable[[StreamDelta], None]
"""Takes a delta at once and never blocks: it runs inside the parser. It must not raise."""
