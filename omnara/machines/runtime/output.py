"""Bytes of output as text: no character is cut that later bytes complete, and what is no UTF-8 becomes `?`.

The text never has more bytes than the span that it stands for, which is what a server checks. Source: machines.md §7.
"""

from __future__ import annotations

import codecs
from typing import Final

import msgspec

from omnara.machines.processes import OutputSlice

__all__ = ["Seen", "seen"]

_QUESTION: Final = "omnara-question"


def _question(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "?", error.end


codecs.register_error(_QUESTION, _question)


class Seen(msgspec.Struct, frozen=True):
    """Output `[cursor, next_cursor)` as text. `truncated`: bytes that were asked for are gone, or more can be read."""

    text: str
    cursor: int
    next_cursor: int
    truncated: bool


def seen(piece: OutputSlice, max_bytes: int) -> Seen:
    """Return a slice that was read with `max_bytes` as text.

    A character whose rest is still to come stays for the next read, unless it alone is longer than `max_bytes`.
    """
    data = piece.data
    open_bytes = _open_tail(data)
    more_there = piece.next_cursor < piece.end
    if open_bytes and (more_there or not piece.closed) and (len(data) > open_bytes or len(data) < max_bytes):
        data = data[: len(data) - open_bytes]
    else:
        open_bytes = 0
    # Bytes of a character that has not arrived whole cannot be read yet, so they are not "more".
    truncated = piece.dropped or more_there
    return Seen(data.decode("utf-8", _QUESTION), piece.cursor, piece.next_cursor - open_bytes, truncated)


def _open_tail(data: bytes) -> int:
    """How many bytes at the end begin a character that further bytes may complete: 0 to 3."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        if byte < 0xC2:
            return 0
        try:
            data[-back:].decode()
        except UnicodeDecodeError as error:
            return back if error.reason == "unexpected end of data" else 0
        return 0
    return 0
