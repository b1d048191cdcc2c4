"""What happens to connections over the limit: they are told so, if that takes no time, and closed.

A client that sends its request at once gets a proper 503; nobody is waited for, since waiting is what the limit is
there to bound.
"""

from __future__ import annotations

import asyncio
from typing import Final, cast

import msgspec

from omnara.errors import Unavailable

__all__ = ["Overflow", "Waiting"]

AT_ONCE: Final = 64
"""Turned-away connections that may be open to hear why. Those beyond are closed unheard."""
_PATIENCE_S: Final = 1.0
_BODY: Final = msgspec.json.encode({"error": "too many connections; try again soon", "code": Unavailable.code})
_ANSWER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nServer: omnara\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


class Waiting:
    """How many connections of one listener are being turned away now."""

    def __init__(self) -> None:
        self.count = 0


class Overflow(asyncio.Protocol):
    """A connection over the limit. Open for a second at most."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait a moment for the request, or close at once when many wait already."""
        self._waiting.count += 1
        self._transport = cast("asyncio.Transport", transport)
        if self._waiting.count > AT_ONCE:
            self._transport.abort()
        else:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer whatever it is. Reading it first keeps the close from being a reset that swallows the answer."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_ANSWER)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another one."""
        self._waiting.count -= 1
        if self._timer is not None:
            self._timer.cancel()
