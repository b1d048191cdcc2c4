"""The API as an aiohttp application: every route of every surface behind the same checks.

`app` builds it once, runs it on an `ApiRunner`, and runs the stream hub as a service beside it.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from aiohttp import web

from omnara.api import cors, openapi
from omnara.api.auth import Authenticator
from omnara.api.connection import ApiRunner
from omnara.api.context import CONTEXT, ApiContext
from omnara.api.daemon import install
from omnara.api.daemon.door import daemon_endpoint
from omnara.api.daemon.gate import Gate
from omnara.api.large_bodies import LargeBodies
from omnara.api.middleware import outermost
from omnara.api.routing import endpoint
from omnara.api.streams import StreamHub
from omnara.engine.authenticate import authenticate
from omnara.engine.deps import Deps
from omnara.fleet.sessions import Sessions

__all__ = ["ApiRunner", "build_app", "build_hub"]

_ALIVE: Final = b'{"status":"ok"}'


def build_hub(deps: Deps) -> StreamHub:
    """Return the keeper of event streams; run it as a service, started before and drained with the application."""
    return StreamHub(
        deps.feed,
        deps.db,
        deps.metrics,
        heartbeat_s=deps.settings.stream_heartbeat_s,
        sweep_s=deps.settings.stream_sweep_s,
    )


def build_app(deps: Deps, hub: StreamHub, sessions: Sessions) -> web.Application:
    """Return the application of the public listener. It owns no task and no connection; everything is in `deps`.

    `sessions`: the channels of machines, a service that is started before it and drained with it.
    """
    app = web.Application(middlewares=[outermost])
    authenticator = Authenticator(functools.partial(authenticate, deps))
    bodies = LargeBodies(deps.settings.large_bodies_bytes, deps.metrics)
    app[CONTEXT] = ApiContext(deps, authenticator, hub, bodies, sessions, Gate(sessions.turns, deps.metrics))
    for route in openapi.ROUTES:
        # Not `add_get`: that one would answer HEAD as well, which the contract has not. Source: api.md §6.
        handler = daemon_endpoint(route) if route.daemon else endpoint(route)
        app.router.add_route(route.method, route.path, handler)
    app.router.add_route("GET", "/healthz", alive)
    app.router.add_route("GET", "/api/openapi.yaml", _document)
    app.router.add_route("GET", install.SCRIPT_PATH, install.script)
    app.router.add_route("GET", install.WHEEL_PATH, install.wheel)
    cors.install(app, deps.settings.cors_origins)
    return app


async def alive(_request: web.Request) -> web.Response:
    """Answer that the process runs. Looks at nothing else, so that a database outage restarts no process."""
    return web.Response(body=_ALIVE, content_type="application/json", headers={"Cache-Control": "no-store"})


async def _document(_request: web.Request) -> web.Response:
    text = await asyncio.to_thread(openapi.yaml_text)
    return web.Response(body=text, content_type="application/yaml")
