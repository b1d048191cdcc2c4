"""Around every request: an id for the logs, metrics, and every failure turned into the one error body.

No exception leaves here as anything but `{"error", "code"}`: what nobody foresaw is logged with its traceback and shown
as nothing more than an internal error. Source: api.md §6.
"""

from __future__ import annotations

import asyncio
import math
from contextvars import ContextVar
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from omnara import log as logs
from omnara.api.context import CONTEXT
from omnara.clock import monotonic
from omnara.errors import NotFound, OmnaraError, Unavailable
from omnara.ids import new_uuid
from omnara.metrics import Metrics

log = logs.get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream"
REQUEST_ID_HEADER: Final = "X-Request-Id"
REQUEST_ID: Final[ContextVar[str]] = ContextVar("omnara_request_id", default="")
"""The id of the request that this task answers, for handlers that send their headers themselves."""
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_INTERNAL: Final = "internal server error"


def error_response(error: OmnaraError) -> web.Response:
    """Return the response for an expected failure."""
    response = _error(error.status, str(error), error.code)
    if isinstance(error, Unavailable):
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return response


def internal_error() -> web.Response:
    """Return the response for a failure that nobody foresaw; it tells nothing about it."""
    return _error(500, _INTERNAL, "internal_error")


def _error(status: int, text: str, code: str) -> web.Response:
    body = msgspec.json.encode({"error": text, "code": code})
    return web.Response(status=status, body=body, content_type="application/json")


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, answer it whatever happens, and count it."""
    started = monotonic()
    request_id = new_uuid().hex
    REQUEST_ID.set(request_id)
    with logs.ids(request_id=request_id):
        response = await _answer(request, handler)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request_id
        _record(request, response, monotonic() - started)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        # An encoded slash would otherwise match as part of an id. Source: api.md §6.
        if "%2f" in request.rel_url.raw_path.lower():
            raise NotFound
        return await handler(request)
    except OmnaraError as error:
        if error.status >= 500 and not isinstance(error, Unavailable):
            log.error("request failed", exc_info=error)
            return internal_error()
        return error_response(error)
    except web.HTTPException as error:
        # The router's own refusals: an unknown path and a wrong method look the same. Source: api.md §6.
        if error.status in {404, 405}:
            return error_response(NotFound())
        return _error(error.status, "invalid request", "invalid_request")
    except asyncio.CancelledError:
        raise
    except Exception as error:  # the last net: everything else must still be an answer
        log.error("request failed", exc_info=error)
        return internal_error()


def _record(request: web.Request, response: web.StreamResponse, seconds: float) -> None:
    metrics: Metrics = request.app[CONTEXT].deps.metrics
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unmatched"
    method = request.method if request.method in _METHODS else "other"
    metrics.http_requests.labels(method, route, str(response.status)).inc()
    if response.content_type != EVENT_STREAM and response.status != 101:
        metrics.http_s.labels(route).observe(seconds)
    log.debug("request", method=method, route=route, status=response.status, seconds=round(seconds, 4))
