"""Content blocks: what people, models and tools say, in the shape of the public contract.

The same structs are stored in `events.payload` and served to clients; nothing is renamed on the way.
Source: contract schemas TextContentBlock … ModelToolCallContentBlock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Block(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of the tagged union; unknown stored fields are ignored so that a newer row stays readable."""


class TextBlock(Block, frozen=True, tag="text"):
    """Plain text."""

    text: str
    metadata: dict[str, str] | None = None


class MediaRefBlock(Block, frozen=True, tag="media_ref"):
    """A reference to a stored artifact (public id `art_…`)."""

    artifact_id: str
    metadata: dict[str, str] | None = None


class ReasoningBlock(Block, frozen=True, tag="reasoning"):
    """Readable reasoning of a model; the signed original lives in `events.replay`."""

    text: str
    metadata: dict[str, str] | None = None


class ErrorBlock(Block, frozen=True, tag="error"):
    """Why a model call ended for good."""

    text: str
    metadata: dict[str, str] | None = None


class StructuredDataBlock(Block, frozen=True, tag="structured_data"):
    """A JSON value from a tool."""

    value: Any
    metadata: dict[str, str] | None = None


class ToolCallBlock(Block, frozen=True, tag="tool_call"):
    """A call that the model asks for. `tool_call_id` is the public id (`tcl_…`)."""

    tool_call_id: str
    tool_type: Literal["built_in", "custom", "mcp"]
    name: str
    input: dict[str, Any]
    metadata: dict[str, str] | None = None


class MediaPart(msgspec.Struct, frozen=True):
    """The place of a stored file in a conversation. What it is and what of it is shown is decided per request."""

    artifact_id: str
    previewed: bool = False
    """Whether its beginning stands beside it as text, so that it is only named."""


OVERFLOW_KEY = "omnara_overflow"
"""Metadata of the reference to a result's text that was too long for the log."""

Part = str | MediaPart
"""One thing said to a model: a text that is not blank, or a file."""


class InlineMedia(msgspec.Struct, frozen=True):
    """A file inside a request. `data` is standard base64. It is stored as an artifact, and this never is."""

    media_type: str
    data: str
    filename: str | None = None
    metadata: dict[str, str] | None = None


InputBlock = TextBlock | MediaRefBlock
NewInputBlock = TextBlock | MediaRefBlock | InlineMedia
OutputBlock = TextBlock | MediaRefBlock | ReasoningBlock | ToolCallBlock | ErrorBlock
ResultBlock = TextBlock | MediaRefBlock | StructuredDataBlock
NewResultBlock = TextBlock | MediaRefBlock | StructuredDataBlock | InlineMedia

EMPTY_RESULT_TEXT = "(no output)"
"""Stands for an empty tool result in requests: providers refuse empty text. Source: field-reports B04."""

INTERRUPTED_TEXT = "Tool call was interrupted; its external outcome is unknown."
"""The one text of an interrupted call. Source: DESIGN §2, invariant 4."""
