"""What every route can reach. Built once by `server.build_app`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from omnara.api.auth import Authenticator
    from omnara.api.daemon.gate import Gate
    from omnara.api.large_bodies import LargeBodies
    from omnara.api.streams import StreamHub
    from omnara.engine.deps import Deps
    from omnara.fleet.sessions import Sessions


class ApiContext(msgspec.Struct, frozen=True):
    """The engine's dependencies, and the parts that the API keeps itself."""

    deps: Deps
    authenticator: Authenticator
    hub: StreamHub
    bodies: LargeBodies
    sessions: Sessions
    gate: Gate


CONTEXT: Final = web.AppKey("context", ApiContext)
