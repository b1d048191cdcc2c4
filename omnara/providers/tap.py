"""The body of an answer, handed over inside the read callback of its connection instead of to a task that waits.

A model's answer is thousands of small pieces, and waking a task for each costs more than reading it. While an answer
streams, a tap stands between the transport and the HTTP client's protocol: the client parses as always, and what it
has decoded goes to the receiver in the same turn of the event loop. Source: DESIGN §5, §9.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import aiohttp

__all__ = ["deliver"]

_LOST: Final = "the connection ended before the answer did"

Take = Callable[[bytes], bool]
"""Takes bytes of the body; True once it needs no more."""


async def deliver(response: aiohttp.ClientResponse, take: Take) -> None:
    """Hand the body to `take` as it arrives, until `take` has enough or the body ends.

    `take` runs in callbacks of the event loop and must not block. What it raises ends the delivery and is raised here,
    as is the aiohttp.ClientError of a connection that broke. Cancellation leaves the rest of the body unread.
    """
    tap = _Tap(response.content, take)
    tap.pump()
    connection = response.connection
    transport = None if connection is None else connection.transport
    if tap.over.done() or connection is None or transport is None:
        # The client gives a connection back once it has the whole body, so nothing more can come.
        tap.end(None)
        return tap.over.result()
    inner = connection.protocol
    assert inner is not None  # there is a transport, so there is one
    tap.enter(inner, transport)
    try:
        await tap.over
    finally:
        tap.leave()
        if not tap.over.cancelled():
            tap.over.exception()  # seen, also when a cancellation came first


class _Tap(asyncio.Protocol):
    """Passes everything on to the client's protocol and looks after each step what that made of it."""

    def __init__(self, content: aiohttp.StreamReader, take: Take) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._content = content
        self._take = take
        self._taken = 0
        self._inner: asyncio.Protocol
        self._transport: asyncio.Transport | None = None

    def enter(self, inner: asyncio.BaseProtocol, transport: asyncio.BaseTransport) -> None:
        """Stand in front of `inner`."""
        self._inner = cast("asyncio.Protocol", inner)
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_protocol(self)

    def leave(self) -> None:
        """Give the connection back to its protocol. Safe to call twice."""
        transport, self._transport = self._transport, None
        if transport is not None and transport.get_protocol() is self:
            transport.set_protocol(self._inner)

    def pump(self) -> None:
        """Hand over what has been decoded; note the end, however it came."""
        content, over = self._content, self.over
        try:
            # Taking bytes may let the client decode further ones that it held back.
            while self._taken < content.total_bytes and not over.done():
                chunk = content.read_nowait()
                if not chunk:
                    break
                self._taken += len(chunk)
                if self._take(chunk):
                    self.end(None)
        except Exception as error:  # noqa: BLE001 - raised by `deliver`, not in the client's parser
            self.end(error)
        if content.is_eof() or content.exception() is not None:
            self.end(content.exception())

    def end(self, error: BaseException | None) -> None:
        """End the delivery; the first reason counts. The connection is somebody else's from now on."""
        if not self.over.done():
            if error is None:
                self.over.set_result(None)
            else:
                self.over.set_exception(error)
            self.leave()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._inner.data_received(data)
        self.pump()

    def eof_received(self) -> bool | None:
        """The endpoint sends no more."""
        keep = self._inner.eof_received()
        self.pump()
        return keep

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: an answer that is not whole by now never will be."""
        self._inner.connection_lost(exc)
        self.pump()
        self.end(aiohttp.ServerDisconnectedError(_LOST))

    def pause_writing(self) -> None:
        """The rest of a request waits for the endpoint."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The endpoint takes the request again."""
        self._inner.resume_writing()
