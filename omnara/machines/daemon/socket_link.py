"""A runtime's line over a WebSocket: text messages, one frame each. Source: machines.md §3."""

from __future__ import annotations

from typing import Final

import aiohttp

from omnara.log import get_logger
from omnara.machines import wire
from omnara.machines.link import LinkClosed

__all__ = ["SocketLink"]

log = get_logger(__name__)

_MALFORMED: Final = 1002
_BROKEN: Final = (aiohttp.ClientError, ConnectionError, RuntimeError)
"""RuntimeError: that is how aiohttp says that the socket is closing."""
_ENDED: Final = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)


class SocketLink:
    """Implements `Link` over an open client socket. What is malformed closes the socket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def send(self, frame: wire.FromDaemon) -> None:
        """Send one frame; waits while the connection is slow. Raises LinkClosed."""
        try:
            await self._socket.send_str(wire.encode(frame).decode())
        except _BROKEN as error:
            raise LinkClosed(self._socket.close_code or 1006, str(error)) from error

    async def receive(self) -> wire.FromServer:
        """Return the next frame. Raises LinkClosed, also after a frame that is none."""
        try:
            message = await self._socket.receive()
        except _BROKEN as error:
            # A ping is answered here, and whoever slept (a laptop that was shut) may find the line gone meanwhile.
            raise LinkClosed(self._socket.close_code or 1006, str(error)) from error
        if message.type is aiohttp.WSMsgType.TEXT:
            try:
                return wire.decode_from_server(message.data)
            except wire.FrameError as error:
                log.error("the server sent a malformed frame", error=str(error))
                await self.close(_MALFORMED)
                raise LinkClosed(_MALFORMED, str(error)) from error
        if message.type in _ENDED or message.type is aiohttp.WSMsgType.ERROR:
            raise LinkClosed(self._socket.close_code or 1006, str(message.extra or ""))
        await self.close(1003)
        raise LinkClosed(1003, "only text is expected")

    async def close(self, code: int = 1000) -> None:
        """Close the socket. May be called again."""
        await self._socket.close(code=code)
