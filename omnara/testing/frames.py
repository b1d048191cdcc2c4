"""Server-sent event frames, labelled so that faults and gates can find their place in a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from omnara.testing.faults import Point

Kind = Literal["open", "thinking", "signature", "text", "arguments", "close", "end"]
"""`open` and `close` bracket blocks, `end` is what closes the answer; the others are deltas."""

DELTAS = frozenset({"thinking", "signature", "text", "arguments"})


class Frame(msgspec.Struct, frozen=True):
    """The bytes of one event, and what they carry."""

    data: bytes
    kind: Kind


def encode(value: Any) -> bytes:
    """Encode JSON. Text with unpaired surrogates is written in escapes, as providers do; msgspec refuses it."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def named(event: str, value: Any) -> bytes:
    """Return an event with a name line, the form of Anthropic and of OpenAI Responses."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), encode(value))


def unnamed(value: Any) -> bytes:
    """Return an event of data only, the form of OpenAI Chat Completions."""
    return b"data: %b\n\n" % encode(value)


def find(frames: Sequence[Frame], point: Point) -> int:
    """Return how many frames lie before `point`. See `Point` for the fallback when the answer lacks it."""
    first = next((at for at, frame in enumerate(frames) if frame.kind in DELTAS), None)
    if first is None:
        first = _index(frames, "end", len(frames))
    if point == "first_delta":
        return first
    if point == "end":
        return _index(frames, "end", len(frames))
    if point == "before_signature":
        return _index(frames, "signature", first)
    return _middle(frames, "text" if point == "mid_text" else "arguments", first)


def _index(frames: Sequence[Frame], kind: Kind, default: int) -> int:
    return next((at for at, frame in enumerate(frames) if frame.kind == kind), default)


def _middle(frames: Sequence[Frame], kind: Kind, default: int) -> int:
    run: list[int] = []
    for at, frame in enumerate(frames):
        if frame.kind == kind:
            run.append(at)
        elif run and frame.kind in ("close", "open"):
            break
    return run[len(run) // 2] if run else default
