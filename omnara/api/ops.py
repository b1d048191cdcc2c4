"""The listener for whoever runs the server: alive, ready, metrics. No keys, so it binds to loopback by default.

Source: api.md §5 (readiness lives only here).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web

from omnara.api.middleware import error_response, internal_error
from omnara.errors import NotFound
from omnara.log import get_logger
from omnara.metrics import CONTENT_TYPE, Metrics

log = get_logger(__name__)

READY_LIMIT_S: Final = 2.0
"""How long readiness may look at Postgres. Source: api.md §5."""


class Readiness(msgspec.Struct, frozen=True):
    """Why a process takes traffic or not. `reason` is empty when it does."""

    ready: bool
    reason: str = ""


Check = Callable[[], Awaitable[Readiness]]
"""Looks at Postgres, the schema and the process's own state. May raise: that means not ready."""


def build_ops_app(metrics: Metrics, check: Check, *, started_at: str) -> web.Application:
    """Return the application of the ops listener. `started_at` is shown by /healthz, RFC 3339."""

    async def healthz(_request: web.Request) -> web.Response:
        return _json(200, {"status": "ok", "started_at": started_at})

    async def readyz(_request: web.Request) -> web.Response:
        found = await _checked(check)
        if found.ready:
            return _json(200, {"status": "ready"})
        return _json(503, {"status": "not_ready", "reason": found.reason})

    async def expose(_request: web.Request) -> web.Response:
        return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(middlewares=[_errors])
    app.router.add_route("GET", "/healthz", healthz)
    app.router.add_route("GET", "/readyz", readyz)
    app.router.add_route("GET", "/metrics", expose)
    return app


async def _checked(check: Check) -> Readiness:
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            return await check()
    except TimeoutError:
        return Readiness(False, f"the check took more than {READY_LIMIT_S:g} s")
    except Exception as error:  # noqa: BLE001 - whatever keeps the check from an answer keeps the process from being ready
        log.warning("readiness check failed", error=type(error).__name__)
        return Readiness(False, "the check failed")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        return error_response(NotFound())
    except Exception as error:  # the last net: everything must still be an answer
        log.error("ops request failed", exc_info=error)
        return internal_error()


def _json(status: int, value: dict[str, str]) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(
        status=status, body=body, content_type="application/json", headers={"Cache-Control": "no-store"}
    )
