"""A daemon's WebSocket as a line of frames, and the route that opens it.

The library's limits are the protocol's: one mebibyte a message, no compression, pings every 20 s that are answered
within 10. Whatever else comes than text frames that can be read closes this socket and touches nothing.
Source: machines.md §3.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import WSMsgType, web

from omnara.api.daemon.door import DaemonCall
from omnara.errors import InvalidRequest
from omnara.log import get_logger
from omnara.machines.frames import FromDaemon, FromServer
from omnara.machines.link import LinkClosed
from omnara.machines.wire import MAX_FRAME_BYTES, FrameError, decode_from_daemon, encode

__all__ = ["SocketLink", "open_socket"]

log = get_logger(__name__)

QUEUE: Final = 64
"""Frames that may wait for a slow machine. Source: machines.md §3."""
PING_S: Final = 20.0
CLOSE_S: Final = 0.5
"""How long a machine may take to agree to the end: a server that stops has closed its sockets within a second."""
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED: Final = 1003
POLICY: Final = 1008


class SocketLink:
    """The server's end of a WebSocket. `writing` must run for as long as it is used."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[str] = asyncio.Queue(QUEUE)
        self._closed: int | None = None

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[SocketLink]:
        """Write what is sent while the block runs; what still waits at its end is written first, if that is quick."""
        writer = asyncio.create_task(self._write(), name="socket-writer")
        try:
            yield self
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await self.close()

    async def send(self, frame: FromServer) -> None:
        """Queue a frame. Never waits: a machine that does not take its frames is cut off. Raises LinkClosed."""
        if self._closed is not None:
            raise LinkClosed(self._closed)
        try:
            self._queue.put_nowait(encode(frame).decode())
        except asyncio.QueueFull:
            await self.close(POLICY)
            raise LinkClosed(POLICY, "too many frames are waiting") from None

    async def receive(self) -> FromDaemon:
        """Return the next frame. Raises LinkClosed, also after closing the socket for something that is no frame."""
        try:
            message = await self._socket.receive()
        except (ConnectionError, RuntimeError) as error:
            # A ping is answered here, over a line that may be gone by now.
            self._closed = self._closed or self._socket.close_code or 1006
            raise LinkClosed(self._closed, str(error)) from error
        match message.type:
            case WSMsgType.TEXT:
                try:
                    return decode_from_daemon(message.data)
                except FrameError as error:
                    log.info("a machine sent what is no frame", error=str(error))
                    await self.close(PROTOCOL_ERROR)
            case WSMsgType.BINARY:
                await self.close(UNSUPPORTED)
            case _:
                self._closed = self._closed or self._socket.close_code or 1006
        raise LinkClosed(self._closed or PROTOCOL_ERROR)

    async def close(self, code: int = 1000) -> None:
        """Write what waits, as far as that is possible at once, and close the socket. May be called again."""
        if self._closed is None:
            self._closed = code
            with contextlib.suppress(TimeoutError, ConnectionError, RuntimeError):
                async with asyncio.timeout(CLOSE_S):
                    if code != POLICY:
                        await self._flush()
            await self._socket.close(code=code, drain=False)

    async def _flush(self) -> None:
        while not self._queue.empty():
            await self._socket.send_str(self._queue.get_nowait())

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reader hears of it
            while True:
                await self._socket.send_str(await self._queue.get())


async def open_socket(call: DaemonCall) -> web.StreamResponse:
    """Take a machine's channel over, until either side closes it.

    Raises RuntimeUnregistered and Unavailable before the upgrade.
    """
    socket = web.WebSocketResponse(
        compress=False, autoping=True, heartbeat=PING_S, max_msg_size=MAX_FRAME_BYTES + 1, timeout=CLOSE_S
    )
    if not socket.can_prepare(call.request).ok:
        raise InvalidRequest("this route is a WebSocket")
    sessions, machine_id = call.context.sessions, call.identity.machine_id
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(call.context.gate.socket(machine_id))
        async with call.visit.turn():
            channel = await stack.enter_async_context(sessions.channel(machine_id, call.ids["runtimeID"]))
        call.visit.leave()
        await socket.prepare(call.request)
        async with SocketLink(socket).writing() as link:
            await sessions.run(channel, link, silence_s=call.context.deps.settings.machine_silence_s)
    return socket
