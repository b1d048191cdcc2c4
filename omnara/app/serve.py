"""`serve`: from settings to a running process, and from a signal to exit code 0.

Order of the start: the ops listener, so that a slow start can be seen; the database and its schema; the first key; then
the services by role. SIGTERM drains, a second one cuts that short. Source: DESIGN §3 (Shutdown).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Iterator
from typing import Final, TypeVar, assert_never

from omnara import probes
from omnara.api.ops import Readiness
from omnara.app.database import bring_up_to_date, check_room, open_database
from omnara.app.first_start import set_up
from omnara.app.garbage import leave_out_what_is_there, rare_full_collections
from omnara.app.keyring import load_ring, ring_of
from omnara.app.listeners import ops_limits, ops_listener
from omnara.app.parts import Parts, build, build_gateway
from omnara.db.connection import ConnectSettings
from omnara.db.service import ping
from omnara.descriptors import raise_limit
from omnara.engine.bootstrap import environment_endpoints
from omnara.log import get_logger
from omnara.metrics import Metrics
from omnara.providers.gateway import ModelGateway
from omnara.service import Crashed, Shutdown, Stopped, Supervisor
from omnara.settings import Settings, unknown_variables

__all__ = ["EXIT_CRASHED", "EXIT_STOPPED", "serve"]

log = get_logger(__name__)

T = TypeVar("T")

EXIT_STOPPED: Final = 0
EXIT_CRASHED: Final = 70


class _StopAsked(Exception):
    """A signal came before the process was up."""


async def serve(settings: Settings) -> int:
    """Run a server until a signal and return the process's exit code: 0 after a stop, 70 after a part failed.

    Raises ConfigurationError and Unavailable when it cannot start. Handles SIGTERM and SIGINT; works as process 1.
    """
    shutdown = Shutdown()
    for warning in unknown_variables():
        log.warning(warning)
    raise_limit()
    with _signals(shutdown), _probes(settings), rare_full_collections():
        async with contextlib.AsyncExitStack() as stack:
            if settings.database_url is not None:
                # What is missing or unreadable is told at once, not after the database has been waited for.
                load_ring(settings, embedded=False)
            environment_endpoints(settings)
            state = _State()
            metrics = Metrics.create()
            ops = ops_listener(settings.ops_listen, metrics, state.check, ops_limits(settings))
            stack.push_async_callback(ops.stop)
            await ops.start()
            gateway = build_gateway(settings)
            stack.push_async_callback(gateway.close)
            try:
                database = await _unless(shutdown, stack.enter_async_context(open_database(settings)))
                parts = await _unless(shutdown, _prepare(settings, database, metrics, gateway))
            except _StopAsked:
                log.info("stopped during the start")
                return EXIT_STOPPED
            return await _run(parts, settings, metrics, state, shutdown)


async def _prepare(settings: Settings, database: ConnectSettings, metrics: Metrics, gateway: ModelGateway) -> Parts:
    """Check the database, bring the schema up to date, set up what a first start sets up, build the parts."""
    await check_room(database)
    await bring_up_to_date(database)
    ring = await ring_of(settings, database)
    await set_up(database, ring, settings)
    return build(settings, database, ring, metrics, gateway)


async def _run(parts: Parts, settings: Settings, metrics: Metrics, state: _State, shutdown: Shutdown) -> int:
    supervisor = Supervisor(parts.services, drain_timeout_s=settings.worker_drain_timeout_s, metrics=metrics)
    state.serve(supervisor, parts)

    def ready() -> None:
        leave_out_what_is_there()
        log.info("ready", roles=sorted(settings.roles))
        probes.hit("ready")

    ended = await supervisor.run(shutdown, on_ready=ready)
    match ended:
        case Stopped():
            log.info("stopped")
            return EXIT_STOPPED
        case Crashed():
            log.critical("a part of the server failed; ending", service=ended.service, exc_info=ended.error)
            return EXIT_CRASHED
        case _:
            assert_never(ended)


class _State:
    """What readiness looks at: nothing is ready before the supervisor says so, nor while Postgres is away."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._parts: Parts | None = None

    def serve(self, supervisor: Supervisor, parts: Parts) -> None:
        """Ask these from now on."""
        self._supervisor, self._parts = supervisor, parts

    async def check(self) -> Readiness:
        """Return whether this process takes traffic. Raises what keeps it from the database."""
        if self._supervisor is None or self._parts is None:
            return Readiness(False, "starting")
        if not self._supervisor.ready:
            return Readiness(False, "starting or stopping")
        async with self._parts.deps.db.acquire() as connection:
            writable = await ping(connection)
        return Readiness(writable, "" if writable else "the database is read-only")


async def _unless(shutdown: Shutdown, work: Awaitable[T]) -> T:
    """Return what `work` returns; cancel it and raise _StopAsked when a stop is asked for first."""
    working = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(shutdown.wait())
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _StopAsked
        return working.result()
    finally:
        for future in (working, asked):
            future.cancel()
        await asyncio.gather(working, asked, return_exceptions=True)


@contextlib.contextmanager
def _signals(shutdown: Shutdown) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into requests to stop while the block runs."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, shutdown.request)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _probes(settings: Settings) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if settings.test_probes is not None:
            stack.enter_context(probes.to_file(settings.test_probes))
        yield
