"""Server-sent events, incrementally: bytes in, whole frames out.

Written here because chunks end anywhere, also inside a character or between CR and LF, and because a server that
never ends a line must not fill the memory.
"""

from __future__ import annotations

import codecs
from typing import Final

import msgspec

from omnara.client.errors import StreamBroken

__all__ = ["Frame", "FrameParser"]

MAX_FRAME_CHARS: Final = 64 * 2**20


class Frame(msgspec.Struct, frozen=True):
    """One event: its name (`message` when not given), its data, and the id if the frame had one."""

    event: str
    data: str
    id: str | None


class FrameParser:
    """Turns chunks into frames. Comments count as a sign of life only; `retry` and unknown fields are ignored."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._parts: list[str] = []
        self._pending = 0
        self._after_cr = False
        self._event = ""
        self._data: list[str] = []
        self._id: str | None = None
        self._size = 0

    def feed(self, chunk: bytes) -> list[Frame]:
        """Take a chunk and return the frames that it completes. Raises StreamBroken for a frame without an end."""
        text = self._decode.decode(chunk)
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        frames: list[Frame] = []
        for line in lines[:-1]:
            self._parts.append(line)
            frame = self._line("".join(self._parts))
            self._parts.clear()
            self._pending = 0
            if frame is not None:
                frames.append(frame)
        if lines[-1]:
            self._parts.append(lines[-1])
            self._pending += len(lines[-1])
        if self._pending + self._size > MAX_FRAME_CHARS:
            raise StreamBroken(f"a frame is longer than {MAX_FRAME_CHARS} characters")
        return frames

    def _line(self, line: str) -> Frame | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._size += len(value)
        elif field == "event":
            self._event = value
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> Frame | None:
        frame = Frame(self._event or "message", "\n".join(self._data), self._id) if self._data else None
        self._event = ""
        self._data = []
        self._id = None
        self._size = 0
        return frame
