"""The routes of daemons. Source: machines.md §2; contract (operation ids, statuses)."""

from __future__ import annotations

from typing import Any, Final, Literal

from omnara.api.daemon import runtimes, socket
from omnara.api.daemon.types import (
    FAILURE_BYTES,
    BootstrapDaemonResponse,
    DaemonRuntime,
    FailureQuery,
    RegisterDaemonRuntimeRequest,
    RegisterDaemonRuntimeResponse,
)
from omnara.api.routing import DaemonHandler, Route
from omnara.ids import IdKind

__all__ = ["ROUTES"]

_BASE: Final = "/api/v1/daemon"
_RUNTIME: Final = {"runtimeID": IdKind.DAEMON_RUNTIME}
_COMMON: Final = frozenset({400, 401, 403, 404, 503})
_RUNTIME_ERRORS: Final = _COMMON | {409, 410}


def _runtime_route(
    method: Literal["GET", "POST"], name: str, operation_id: str, handler: DaemonHandler, response: tuple[int, Any]
) -> Route:
    """A route of one runtime; whose it is, the token says."""
    return Route(
        method=method,
        path=f"{_BASE}/runtimes/{{runtimeID}}/{name}",
        operation_id=operation_id,
        handler=handler,
        daemon=True,
        is_socket=response[0] == 101,
        path_ids=_RUNTIME,
        responses={response[0]: response[1]},
        errors=_RUNTIME_ERRORS,
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=f"{_BASE}/bootstrap",
        operation_id="bootstrapDaemon",
        handler=runtimes.bootstrap,
        daemon=True,
        responses={200: BootstrapDaemonResponse},
        errors=_COMMON,
    ),
    Route(
        method="POST",
        path=f"{_BASE}/runtimes",
        operation_id="registerMachineDaemonRuntime",
        handler=runtimes.register_runtime,
        daemon=True,
        body=RegisterDaemonRuntimeRequest,
        responses={201: RegisterDaemonRuntimeResponse},
        errors=_RUNTIME_ERRORS,
    ),
    _runtime_route("GET", "socket", "socketMachineDaemonRuntime", socket.open_socket, (101, None)),
    _runtime_route("POST", "end", "endMachineDaemonRuntime", runtimes.end, (200, DaemonRuntime)),
    _runtime_route("POST", "sleep", "sleepMachineDaemonRuntime", runtimes.sleep, (200, DaemonRuntime)),
    Route(
        method="POST",
        path=f"{_BASE}/failures",
        operation_id="recordMachineFailure",
        handler=runtimes.failure,
        daemon=True,
        query=FailureQuery,
        text_limit=FAILURE_BYTES,
        responses={204: None},
        errors=frozenset({400, 401, 403}),
        further_errors=frozenset({409}),
    ),
)
