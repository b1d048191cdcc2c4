"""A conversation written down for the model that summarises it: one JSON object a line, bounded in size.

Plain text rather than messages, so that no tool has to be offered and nothing has to be replayed; JSON, so that nothing
that was said can pass for somebody else's words. Reasoning is not in it.
Source: engine.md §6 (summary call).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, assert_never

import msgspec

from omnara.domain.content import TextBlock, ToolCallBlock
from omnara.domain.message import AssistantMessage, Message, ToolResultsMessage, UserMessage

RESULT_BYTES: Final = 32_768
"""How much of a tool's output is written down. Source: engine.md §6."""

_NARROWER: Final = (8192, 2048, 512)
"""Bounds for every text, tried in turn when the whole is too long."""


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    text: str = ""
    tool: str = ""
    failed: bool = False


def write_transcript(messages: Sequence[Message], max_bytes: int) -> str:
    """Return the transcript in at most about `max_bytes`.

    Tool output is bounded always. When the whole is too long, every text is bounded ever more tightly; when even that
    is not enough, messages in the middle are left out, and the place is marked. The first line, which holds an earlier
    summary if there is one, is only ever shortened.
    """
    lines = [line for message in messages for line in _lines(message)]
    written = _write(lines, None)
    for bound in _NARROWER:
        if _size(written) <= max_bytes:
            break
        written = _write(lines, bound)
    if _size(written) > max_bytes:
        written = _without_middle(written, max_bytes)
    return "\n".join(written)


def shorten(text: str, max_bytes: int) -> str:
    """Return the first three quarters and the last quarter of a text that is too long, with what was left out."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    head, tail = data[: max_bytes * 3 // 4], data[len(data) - max_bytes // 4 :]
    gap = len(data) - len(head) - len(tail)
    return f"{head.decode('utf-8', 'ignore')}\n[… {gap} bytes left out …]\n{tail.decode('utf-8', 'ignore')}"


def _lines(message: Message) -> Iterator[_Line]:
    if isinstance(message, UserMessage):
        for text in message.texts:
            yield _Line("user", text)
    elif isinstance(message, ToolResultsMessage):
        for result in message.results:
            yield _Line("tool", result.text, failed=result.failed)
    elif isinstance(message, AssistantMessage):
        for block in message.blocks:
            if isinstance(block, TextBlock):
                yield _Line("assistant", block.text)
            elif isinstance(block, ToolCallBlock):
                yield _Line("assistant", msgspec.json.encode(block.input).decode(), tool=block.name)
    else:
        assert_never(message)


def _write(lines: Sequence[_Line], bound: int | None) -> list[str]:
    return [_encode(line, _bound_of(line, bound, first=number == 0)) for number, line in enumerate(lines)]


def _bound_of(line: _Line, bound: int | None, *, first: bool) -> int | None:
    if bound is None:
        return RESULT_BYTES if line.role == "tool" else None
    return max(bound, RESULT_BYTES) if first else bound


def _encode(line: _Line, bound: int | None) -> str:
    short = line if bound is None else msgspec.structs.replace(line, text=shorten(line.text, bound))
    return msgspec.json.encode(short).decode()


def _size(written: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in written)


def _without_middle(written: list[str], max_bytes: int) -> list[str]:
    first = shorten(written[0], max(max_bytes // 3, 64))
    room = max_bytes - len(first.encode())
    kept: list[str] = []
    for line in reversed(written[1:]):
        room -= len(line.encode()) + 1
        if room < 0:
            break
        kept.append(line)
    gap = len(written) - 1 - len(kept)
    return [first, f"[… {gap} messages left out …]", *reversed(kept)]
