"""What a conversation is made of, whatever the wire format: what people said, answers to calls, outputs of a model.

They are apart from the fold because providers render them and never fold.
Source: engine.md §6 (layout).
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from omnara.domain.content import MediaPart, Part, TextBlock, ToolCallBlock
from omnara.domain.context_text import media_text
from omnara.domain.events import EventMeta

OVERHEAD = 200
"""Bytes that a message costs beside its text: an estimate for the memory bound of a cache, not a measure."""


class UserMessage(msgspec.Struct, frozen=True):
    """What people said, and notices, oldest first. Never empty, no text is blank."""

    sequence: int
    parts: tuple[Part, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The parts as text, files by their names only."""
        return tuple(part if isinstance(part, str) else media_text(part.artifact_id) for part in self.parts)


class AnsweredCall(msgspec.Struct, frozen=True):
    """The one answer to a call. `failed` covers every outcome but success; the text already says which.

    `media` are the files of the result, which `text` names in their places.
    """

    tool_call_id: str
    text: str
    failed: bool
    media: tuple[MediaPart, ...] = ()


class ToolResultsMessage(msgspec.Struct, frozen=True):
    """The answers to all calls of the assistant message before it, in call order."""

    sequence: int
    results: tuple[AnsweredCall, ...]


class AssistantMessage(msgspec.Struct, frozen=True):
    """An accepted output: texts that are not blank, and calls. `replay` is opaque and only for the same model."""

    sequence: int
    blocks: tuple[TextBlock | ToolCallBlock, ...]
    meta: EventMeta
    replay: bytes | None

    @property
    def calls(self) -> tuple[ToolCallBlock, ...]:
        """The calls, in order."""
        return tuple(block for block in self.blocks if isinstance(block, ToolCallBlock))


Message = UserMessage | ToolResultsMessage | AssistantMessage


def media_of(message: Message) -> tuple[MediaPart, ...]:
    """The files in a message, in order."""
    if isinstance(message, UserMessage):
        return tuple(part for part in message.parts if isinstance(part, MediaPart))
    if isinstance(message, ToolResultsMessage):
        return tuple(media for result in message.results for media in result.media)
    return ()


def part_size(part: Part) -> int:
    """Estimate of the memory that a part takes, in bytes."""
    return (len(part) if isinstance(part, str) else len(part.artifact_id)) + OVERHEAD


def size_of(message: Message) -> int:
    """Estimate of the memory that a message takes, in bytes."""
    if isinstance(message, UserMessage):
        return sum(map(part_size, message.parts))
    if isinstance(message, ToolResultsMessage):
        return sum(len(result.text) + OVERHEAD for result in message.results)
    if isinstance(message, AssistantMessage):
        texts = sum(len(block.text) for block in message.blocks if isinstance(block, TextBlock))
        # A call's input is a tree of small objects: four times its text is close.
        calls = sum(4 * len(msgspec.json.encode(call.input)) for call in message.calls)
        return texts + calls + len(message.replay or b"") + OVERHEAD * (1 + len(message.blocks))
    assert_never(message)
