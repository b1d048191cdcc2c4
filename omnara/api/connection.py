"""The server's end of a client connection, with what the library leaves out.

An idle stream learns at once that its client is gone, instead of at its next write; bytes that are no HTTP get the same
error body as everything else; and no client holds a socket for nothing: a request has to arrive, an answer has to be
taken, and only so many connections are open. Source: field-reports B31 (a handler is not cancelled on disconnect);
api.md §6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from omnara.api.overflow import Overflow, Waiting
from omnara.log import get_logger

__all__ = ["ApiRunner", "Connection", "ConnectionLimits"]

log = get_logger(__name__)

HEADER_LIMIT: Final = 16 * 1024
"""Bytes of one header line or of the request line."""
SERVER_NAME: Final = "omnara"
"""Says nothing about versions, which only an attacker would look up."""
_LINGER_S: Final = 10.0
"""How long the rest of a body that nobody wants is taken, so that the client sees its answer."""


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may take of a listener. The limits of bodies are with their readers (`api.body`).

    `head_s`: for a whole request head, from the connection on or from its first byte after an idle time.
    `idle_s`: without any request. `stall_s`: without taking a byte of an answer. `connections`: open at once.
    """

    head_s: float = 10.0
    idle_s: float = 75.0
    stall_s: float = 30.0
    connections: int = 128


class Connection(RequestHandler):
    """A connection that tells when it is lost and that does not wait for ever."""

    __slots__ = ("_head", "_limits", "_pipe", "_server", "_stall", "on_lost")

    def __init__(self, server: _Server, limits: ConnectionLimits, **options: Any) -> None:
        linger_s = min(limits.head_s, _LINGER_S)
        super().__init__(server, keepalive_timeout=limits.idle_s, lingering_time=linger_s, **options)
        self.on_lost: Callable[[], None] | None = None
        self._server = server
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._pipe: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a request."""
        self._pipe = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those that begin a request have to be followed by the rest of its head in time."""
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._forget_head()
        elif self._head is None and self._waiter is not None and not self._waiter.done():
            self._expect_head()

    async def start(self) -> None:
        """Serve requests until the connection is to be closed, then let the client take the last answer, or not."""
        try:
            await super().start()
        finally:
            if self._stall is None:
                self._watch_writing()

    def pause_writing(self) -> None:
        """The client is slower than the answer: see to it that it takes something at all."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client took enough."""
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the stream that is being sent, then clean up as usual."""
        self._forget_head()
        self._forget_stall()
        self._server.released()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head = self._loop.call_later(self._limits.head_s, self.force_close)

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _watch_writing(self) -> None:
        """Cut the connection unless the client takes some of what waits. A closed transport waits for that, too."""
        waiting = 0 if self._pipe is None else self._pipe.get_write_buffer_size()
        self._stall = self._loop.call_later(self._limits.stall_s, self._look, waiting) if waiting else None

    def _look(self, before: int) -> None:
        if self._pipe is not None and self._pipe.get_write_buffer_size() >= before:
            self._pipe.abort()
        else:
            self._watch_writing()

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response. What the library raised before any of our code ran gets the contract's form."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _failure(400, "invalid request: the only expectation is 100-continue")
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer bytes that are no request, and the failures of the library itself, in the contract's form."""
        if exc is not None and status >= 500:
            self.logger.error("error handling request", exc_info=exc)
        bad = status < 500
        return _failure(
            status, "invalid request: the bytes are not an HTTP request" if bad else "internal server error"
        )

    @staticmethod
    @contextmanager
    def watch(request: web.Request, on_lost: Callable[[], None]) -> Iterator[None]:
        """Call `on_lost` if the request's connection ends inside the block."""
        protocol = request.protocol
        if not isinstance(protocol, Connection):
            yield
            return
        protocol.on_lost = on_lost
        try:
            yield
        finally:
            protocol.on_lost = None


def _failure(status: int, text: str) -> web.Response:
    code = "invalid_request" if status < 500 else "internal_error"
    body = msgspec.json.encode({"error": text, "code": code})
    headers = {hdrs.SERVER: SERVER_NAME}
    response = web.Response(status=status, body=body, content_type="application/json", headers=headers)
    response.force_close()
    return response


class _Server(web.Server):
    """Makes connections, as many as are allowed."""

    def __init__(self, plain: web.Server, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(plain.request_handler, request_factory=plain.request_factory, **options)
        self._limits = limits
        self._open = 0
        self._full = False
        self._waiting = Waiting()

    def __call__(self) -> RequestHandler:
        # Counted here and not when the connection is made: a burst is accepted whole before the first one is made.
        if self._open >= self._limits.connections:
            if not self._full:
                self._full = True
                log.warning("too many connections; turning clients away", connections=self._open)
            return cast("RequestHandler", Overflow(self._waiting))  # the loop needs a protocol, no more
        self._open += 1
        return Connection(self, self._limits, loop=self._loop, **self._kwargs)

    def released(self) -> None:
        """Note that a connection ended."""
        self._open -= 1
        if self._full and self._open < self._limits.connections * 0.9:
            self._full = False
            log.info("accepting connections again", connections=self._open)


async def _sign(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = SERVER_NAME


class ApiRunner(web.AppRunner):
    """Runs an application on connections of our kind."""

    def __init__(
        self, app: web.Application, limits: ConnectionLimits | None = None, *, shutdown_timeout_s: float = 1.0
    ) -> None:
        # Streams are closed by the hub beforehand; whatever still runs gets this long. Source: field-reports B56.
        super().__init__(
            app,
            access_log=None,
            shutdown_timeout=shutdown_timeout_s,
            max_line_size=HEADER_LIMIT,
            max_field_size=HEADER_LIMIT,
            # A megabyte may unpack to a gigabyte, on the event loop, and strangers can send it: the library unpacks
            # even what it only reads to throw it away.
            auto_decompress=False,
        )
        self._limits = limits or ConnectionLimits()
        app.on_response_prepare.append(_sign)

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._limits, **self._kwargs)
