"""The server's end of a client connection, with two things that the library leaves out.

An idle stream learns at once that its client is gone, instead of at its next write; and bytes that are no HTTP get the
same error body as everything else. Source: field-reports B31 (a handler is not cancelled on disconnect); api.md §6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

HEADER_LIMIT: Final = 16 * 1024
"""Bytes of one header line or of the request line."""


class Connection(RequestHandler):
    """A connection that tells when it is lost."""

    __slots__ = ("on_lost",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_lost: Callable[[], None] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the stream that is being sent, then clean up as usual."""
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer bytes that are no request, and the failures of the library itself, in the contract's form."""
        if exc is not None and status >= 500:
            self.logger.error("error handling request", exc_info=exc)
        bad = status < 500
        text = "invalid request: the bytes are not an HTTP request" if bad else "internal server error"
        body = msgspec.json.encode({"error": text, "code": "invalid_request" if bad else "internal_error"})
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response

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


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class ApiRunner(web.AppRunner):
    """Runs an application on connections of our kind."""

    def __init__(self, app: web.Application, *, shutdown_timeout_s: float = 1.0) -> None:
        # Streams are closed by the hub beforehand; whatever still runs gets this long. Source: field-reports B56.
        super().__init__(
            app,
            access_log=None,
            shutdown_timeout=shutdown_timeout_s,
            max_line_size=HEADER_LIMIT,
            max_field_size=HEADER_LIMIT,
        )

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return _Server(plain.request_handler, request_factory=plain.request_factory, **self._kwargs)
