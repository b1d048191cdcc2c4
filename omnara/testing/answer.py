"""What a scripted model says: values that a script returns and the wire modules encode.

They exist apart from the wire formats so that one script serves all three, and they decode from JSON so
that a test, the demo or another process can say what it wants in data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from omnara.testing.faults import Fault

Stop = Literal[
    "end_turn",
    "max_tokens",
    "tool_use",
    "stop_sequence",
    "refusal",
    "content_filter",
    "pause_turn",
    "model_context_window_exceeded",
]

_PIECE_CHARS = 12
_MAX_PIECES = 256


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A text block. `chunks`, when given, are the deltas exactly as sent and `text` is ignored."""

    text: str = ""
    chunks: tuple[str, ...] = ()

    def full(self) -> str:
        """Return the whole text of the block."""
        return "".join(self.chunks) if self.chunks else self.text


class Thinking(msgspec.Struct, frozen=True, tag="thinking"):
    """A reasoning block.

    Anthropic: `thinking` with a signature, or `redacted_thinking`. Responses: a reasoning item with a
    summary. Chat: `reasoning_content` deltas, which carry no signature.
    """

    text: str = ""
    redacted: bool = False


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A tool call. `raw` replaces the encoded arguments by any text, for calls that are broken on purpose."""

    name: str
    arguments: Mapping[str, Any] = msgspec.field(default_factory=dict)
    raw: str | None = None
    id: str | None = None

    def encoded(self) -> str:
        """Return the arguments as JSON text, or `raw` unchanged."""
        return self.raw if self.raw is not None else msgspec.json.encode(self.arguments).decode()


Block = Text | Thinking | Call


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts to report. `None` means: count from the sizes of request and answer."""

    input: int | None = None
    output: int | None = None
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """When the bytes leave; milliseconds.

    `delay_ms` before the status line, `first_ms` between headers and first delta, `token_ms` before every
    following delta, `tokens` deltas per text (`None`: by size), `chunk_bytes` cuts the stream into writes
    of that many bytes regardless of frames (1: byte by byte).
    """

    delay_ms: float = 0
    first_ms: float = 0
    tokens: int | None = None
    token_ms: float = 0
    chunk_bytes: int | None = None

    def immediate(self) -> bool:
        """Return whether the whole answer may leave in one write."""
        return not (self.delay_ms or self.first_ms or self.token_ms or self.chunk_bytes)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model.

    `stop` defaults to `tool_use` when there is a call and to `end_turn` otherwise. `fault` strikes the
    first `fault_attempts` requests of the same conversation at the same turn.
    """

    blocks: tuple[Block, ...] = ()
    stop: Stop | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    fault: Fault | None = None
    fault_attempts: int = 1

    @property
    def stop_reason(self) -> Stop:
        """The stop reason to report."""
        if self.stop is not None:
            return self.stop
        return "tool_use" if self.calls else "end_turn"

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls, in order."""
        return tuple(block for block in self.blocks if isinstance(block, Call))

    @property
    def text(self) -> str:
        """All text of the answer joined."""
        return "".join(block.full() for block in self.blocks if isinstance(block, Text))


def say(*texts: str, stop: Stop | None = None) -> Answer:
    """Return an answer of one text block per argument."""
    return Answer(blocks=tuple(Text(text) for text in texts), stop=stop)


def call(name: str, arguments: Mapping[str, Any] | None = None, *, text: str = "") -> Answer:
    """Return an answer that calls one tool, after `text` if there is any."""
    before: tuple[Block, ...] = (Text(text),) if text else ()
    return Answer(blocks=(*before, Call(name, arguments or {})))


def pieces(text: str, tokens: int | None) -> list[str]:
    """Cut `text` into deltas: `tokens` equal parts (fewer when it is shorter), or by size when `None`.

    Joined, the parts are always `text`; a text without characters has no parts.
    """
    if not text:
        return []
    parts = tokens if tokens is not None else min(_MAX_PIECES, math.ceil(len(text) / _PIECE_CHARS))
    size = max(1, math.ceil(len(text) / max(1, parts)))
    return [text[at : at + size] for at in range(0, len(text), size)]


def count_tokens(text: str) -> int:
    """Return an estimate of the tokens in `text`: one per word piece of at most four characters."""
    return sum(math.ceil(len(word) / 4) for word in re.findall(r"\S+", text)) or 1
