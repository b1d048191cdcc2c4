"""How a keeper is spoken to: one connection for each request, one answer, and both close.

A request is a length (four bytes), that many bytes of JSON, and the bytes that its `size` announces; `ready`, ahead of
the word to begin, has no connection of its own; only a keeper that has begun already answers it. An answer is a
length and JSON. A connection that ends without an answer means that the keeper is gone: the files say the rest.

A keeper may be older than whoever speaks to it, since commands outlive updates: requests may gain fields, and no more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

__all__ = ["CONTROL", "LENGTH", "LONGEST_DATA", "Connection", "message"]

CONTROL = "control"
LENGTH = struct.Struct(">I")
_LONGEST_HEADER = 16 * 1024
LONGEST_DATA = 131_072
"""Source: machines.md §7 (write)."""
_ACTION: dict[str, type] = {"id": str, "seq": int}
_NEEDED: dict[str, dict[str, type]] = {
    "ready": {},
    "watch": {"end": int},
    "stop": {"reason": str},
    "write": {**_ACTION, "size": int, "close": bool},
    "interrupt": _ACTION,
    "terminate": _ACTION,
}


def message(value: dict[str, Any], data: bytes = b"") -> bytes:
    """Encode one request or answer."""
    header = json.dumps(value).encode()
    return LENGTH.pack(len(header)) + header + data


def _checked(header: Any) -> dict[str, Any]:
    """Return a request that has what it needs. Raises ValueError: nonsense must not bring a keeper down."""
    kind = header.get("op") if isinstance(header, dict) else None
    needed = _NEEDED.get(kind) if isinstance(kind, str) else None
    if needed is None or any(type(header.get(name)) is not kind for name, kind in needed.items()):
        raise ValueError("not a request")
    if not 0 <= header.get("size", 0) <= LONGEST_DATA:
        raise ValueError("too much data")
    found: dict[str, Any] = header
    return found


class Connection:
    """The keeper's side of one connection. Never waits."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a socket."""
        sock.setblocking(False)
        self.socket = sock
        self.open = True
        self._received = bytearray()

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """Take what has arrived; return the next request once it is whole. Closes on an end, and on nonsense."""
        try:
            known = self._request()
            if known is not None:
                return known
            data = self.socket.recv(64 * 1024)
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            data = b""
        if not data:
            self.close()
            return None
        self._received += data
        try:
            return self._request()
        except ValueError:
            self.close()
            return None

    def _request(self) -> tuple[dict[str, Any], bytes] | None:
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if length > _LONGEST_HEADER:
            raise ValueError(length)
        end = LENGTH.size + length
        if len(self._received) < end:
            return None
        header = _checked(json.loads(self._received[LENGTH.size : end]))
        size = int(header.get("size", 0))
        if len(self._received) < end + size:
            return None
        data = bytes(self._received[end : end + size])
        del self._received[: end + size]
        return header, data

    def tell(self, value: dict[str, Any]) -> None:
        """Send something small and keep the connection. Whoever does not read has no claim to be told."""
        if self.open:
            with contextlib.suppress(OSError):
                self.socket.send(message(value))

    def answer(self, value: dict[str, Any]) -> None:
        """Send the answer and close."""
        self.tell(value)
        self.close()

    def close(self) -> None:
        """Hang up. May be called again."""
        self.open = False
        self.socket.close()
