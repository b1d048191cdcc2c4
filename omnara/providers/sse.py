"""Server-sent events out of raw bytes, in whatever pieces the network delivers.

Written by hand because both ready-made ways fail here: the SDKs' decoders build typed objects at several times the
cost, and reading line by line hits a hidden cap of the HTTP library on long lines.
Source: WHATWG HTML §9.2.6 (event stream interpretation); field-reports B13 (split characters), B47 (long lines).
"""

from __future__ import annotations

from typing import Final

MAX_RESPONSE_BYTES: Final = 64 * 1024 * 1024
"""Largest response that is read. Source: engine.md §5."""

MAX_EVENT_BYTES: Final = 32 * 1024 * 1024
"""Largest single event. Source: field-reports B47."""

_BOM: Final = b"\xef\xbb\xbf"


class StreamTooLarge(Exception):
    """The response, one event of it, or what it says is over its stated bound. To ask again would bring the same."""


class SseParser:
    """Incremental parser. Feed it bytes; it gives back the data of each event that they complete.

    Event names, ids and retry hints are read past: the model formats repeat the name inside the data.
    """

    __slots__ = (
        "_data", "_data_bytes", "_held", "_held_bytes", "_max_event", "_max_total", "_skip_lf", "_started",
        "total_bytes",
    )  # fmt: skip

    def __init__(self, *, max_total: int = MAX_RESPONSE_BYTES, max_event: int = MAX_EVENT_BYTES) -> None:
        self.total_bytes = 0
        self._max_total = max_total
        self._max_event = max_event
        self._data: list[bytes] = []  # data lines of the event under construction
        self._data_bytes = 0
        self._held: list[bytes] = []  # pieces of a line whose end has not come: joined once, so long lines stay linear
        self._held_bytes = 0
        self._skip_lf = False
        self._started = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of completed events, in order.

        Events without data are left out, and so is an event whose final blank line never comes.

        Raises StreamTooLarge; the parser is unusable afterwards.
        """
        self.total_bytes += len(chunk)
        if self.total_bytes > self._max_total:
            raise StreamTooLarge(f"the response is larger than {self._max_total} bytes")
        if self._skip_lf or b"\r" in chunk:
            chunk = self._normalized(chunk)
        if b"\n" not in chunk:
            self._hold(chunk)
            return []
        if self._held:
            self._held.append(chunk)
            chunk = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
        lines = chunk.split(b"\n")
        self._hold(lines.pop())
        if not self._started:
            self._started = True
            lines[0] = lines[0].removeprefix(_BOM)
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if not line:
                if data:
                    event = data[0] if len(data) == 1 else b"\n".join(data)
                    data.clear()
                    self._data_bytes = 0
                    if event:
                        events.append(event)
            elif line.startswith(b"data:"):
                self._add_data(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._add_data(b"")
        return events

    def _add_data(self, data: bytes) -> None:
        self._data.append(data)
        self._data_bytes += len(data) + 1
        if self._data_bytes - 1 > self._max_event:
            raise StreamTooLarge(f"an event is larger than {self._max_event} bytes")

    def _normalized(self, chunk: bytes) -> bytes:
        """Turn CR and CRLF into LF. A CR at the end ends its line at once; an LF that follows belongs to it."""
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        if chunk.endswith(b"\r"):
            self._skip_lf = True
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._max_event:
            raise StreamTooLarge(f"an event is larger than {self._max_event} bytes")
