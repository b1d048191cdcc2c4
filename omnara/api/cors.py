"""Letting web pages of other origins call the API from a browser: off unless origins are named.

A page needs permission only to read answers and to send headers; it gets no credentials of the browser, since the API
takes none but a bearer token that the page itself must have. So what a preflight asks for is granted as asked.
Source: the Fetch standard, "CORS protocol"; api.md §4 (cookies are another matter, and are not served here).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

__all__ = ["install"]

EXPOSED: Final = "Content-Disposition, Content-Range, ETag, Retry-After, X-Request-Id"
"""Headers of answers that a page may read beyond those that every page may."""
METHODS: Final = "GET, POST, PUT, PATCH, DELETE"
DEFAULT_HEADERS: Final = "Authorization, Content-Type, Idempotency-Key, Last-Event-ID"
MAX_AGE_S: Final = 7200
"""How long a browser may remember a preflight; the longest that all of them accept."""
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_HEADERS: Final = 2048


def install(app: web.Application, origins: Sequence[str]) -> None:
    """Answer the browsers of these origins (`*`: of all). Call before the application is run; does nothing for none."""
    if not origins:
        return
    policy = _Policy(frozenset(origins))
    app.middlewares.insert(0, policy.preflight())
    app.on_response_prepare.append(policy.allow)


class _Policy:
    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins
        self._any = "*" in origins

    def preflight(self) -> Middleware:
        """Return the middleware that answers a browser's question before the request itself."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            if not asks or self._allowed(request) is None:
                return await handler(request)
            return web.Response(
                status=204,
                headers={
                    hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
                    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: _wanted_headers(request),
                    hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
                },
            )

        return answer

    async def allow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page read this answer, whatever it is: an event stream and an error too."""
        if not self._any:
            # Also on answers to others, or a cache would give theirs to an allowed page.
            _vary(response, hdrs.ORIGIN)
        origin = self._allowed(request)
        if origin is None:
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        if request.method != hdrs.METH_OPTIONS:
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        """Return what `Access-Control-Allow-Origin` says to this request, or None."""
        origins = request.headers.getall(hdrs.ORIGIN, [])
        if len(origins) != 1:
            return None
        if self._any:
            return "*"
        return origins[0] if origins[0] in self._origins else None


def _wanted_headers(request: web.Request) -> str:
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    return wanted if len(wanted) <= _MAX_HEADERS and _HEADER_NAMES.fullmatch(wanted) else DEFAULT_HEADERS


def _vary(response: web.StreamResponse, name: str) -> None:
    present = response.headers.get(hdrs.VARY)
    response.headers[hdrs.VARY] = name if present is None else f"{present}, {name}"
