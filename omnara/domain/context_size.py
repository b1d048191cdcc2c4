"""How large a conversation is for a model: an estimate in tokens, kept up as it grows instead of counted anew.

No provider's tokenizer is at hand, and none is needed: the estimate decides only when to make a conversation smaller,
and a provider that disagrees says so and is believed.
Source: engine.md §6 (estimate, media).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import msgspec

from omnara.domain.content import MediaPart, Part, TextBlock
from omnara.domain.message import AnsweredCall, AssistantMessage, Message, ToolResultsMessage, UserMessage

BYTES_PER_TOKEN: Final = 4
MEDIA_TOKENS: Final = 4784
"""The price of a file: that of an image. What a file is, and how much of it is shown, is known per request only."""

_FRAME: Final = 40
_CALL: Final = 110
_ANSWER: Final = 90
"""Bytes of JSON around a text, a call and the answer to one, ids included."""


class Cut(msgspec.Struct, frozen=True):
    """A place where a conversation may be cut: everything up to event `through`, and nothing after it, goes.

    `index` counts the settled messages before it; None when part of the open side goes too. `before` is their size in
    bytes. `between_turns`: what goes ends with an answer, not in the middle of work.
    """

    through: int
    index: int | None
    before: int
    between_turns: bool


def tokens(size: int) -> int:
    """Return the estimate in tokens for a size in bytes."""
    return size // BYTES_PER_TOKEN + 1


def text_bytes(text: str) -> int:
    """Return the size of a text in a request."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def parts_bytes(parts: Sequence[Part]) -> int:
    """Return the size of what people said, files at their price in tokens."""
    media = MEDIA_TOKENS * BYTES_PER_TOKEN
    return sum(media if isinstance(part, MediaPart) else text_bytes(part) + _FRAME for part in parts)


def answer_bytes(answer: AnsweredCall) -> int:
    """Return the size of the answer to a call."""
    return text_bytes(answer.text) + _ANSWER + parts_bytes(answer.media)


def message_bytes(message: Message) -> int:
    """Return the size of a message in a request, in bytes."""
    if isinstance(message, UserMessage):
        return _FRAME + parts_bytes(message.parts)
    if isinstance(message, ToolResultsMessage):
        return _FRAME + sum(map(answer_bytes, message.results))
    if isinstance(message, AssistantMessage):
        texts = sum(text_bytes(block.text) + _FRAME for block in message.blocks if isinstance(block, TextBlock))
        calls = sum(len(msgspec.json.encode(call.input)) + len(call.name) + _CALL for call in message.calls)
        # What is replayed takes the place of the neutral blocks.
        return _FRAME + max(texts + calls, len(message.replay or b""))
    assert_never(message)
