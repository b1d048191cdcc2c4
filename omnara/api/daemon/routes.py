"""The routes of daemons. Source: machines.md §2; contract (operation ids, statuses)."""

from __future__ import annotations

from typing import Final

from omnara.api.daemon import runtimes, socket
from omnara.api.daemon.types import (
    FAILURE_BYTES,
    BootstrapDaemonResponse,
    DaemonRuntime,
    FailureQuery,
    RegisterDaemonRuntimeRequest,
    RegisterDaemonRuntimeResponse,
)
from omnara.api.routing import Route
from omnara.ids import IdKind

__all__ = ["ROUTES"]

_BASE: Final = "/api/v1/daemon"
_RUNTIME: Final = {"runtimeID": IdKind.DAEMON_RUNTIME}
_COMMON: Final = frozenset({400, 401, 403, 404, 503})
_RUNTIME_ERRORS: Final = _COMMON | {409, 410}

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
    Route(
        method="GET",
        path=f"{_BASE}/runtimes/{{runtimeID}}/socket",
        operation_id="socketMachineDaemonRuntime",
        handler=socket.open_socket,
        daemon=True,
        path_ids=_RUNTIME,
        responses={101: None},
        errors=_RUNTIME_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{_BASE}/runtimes/{{runtimeID}}/end",
        operation_id="endMachineDaemonRuntime",
        handler=runtimes.end,
        daemon=True,
        path_ids=_RUNTIME,
        responses={200: DaemonRuntime},
        errors=_RUNTIME_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{_BASE}/runtimes/{{runtimeID}}/sleep",
        operation_id="sleepMachineDaemonRuntime",
        handler=runtimes.sleep,
        daemon=True,
        path_ids=_RUNTIME,
        responses={200: DaemonRuntime},
        errors=_RUNTIME_ERRORS,
    ),
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
