"""Parts of a process that live as long as it does: how they start, become ready, drain, stop and fail.

One supervisor owns them all. They start in order and stop in reverse; when one fails, the process ends, because a
process that looks alive while a part of it is gone is the state nobody notices. Source: DESIGN §3 (Shutdown), §7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import msgspec

from omnara.clock import Deadline
from omnara.log import get_logger
from omnara.metrics import Metrics

__all__ = ["Crashed", "Ended", "Service", "Shutdown", "Stopped", "Supervisor", "Tasks"]

log = get_logger(__name__)

STOP_LIMIT_S: Final = 10.0
"""How long one part may take to stop before it is abandoned; the process is about to end anyway."""


class Service(Protocol):
    """A part of the process. The supervisor calls `start`, `drain`, `stop` once each, from one task, in this order."""

    @property
    def name(self) -> str:
        """A short word for logs and metrics."""

    async def start(self) -> None:
        """Return when ready for work. Raises if that cannot be; `stop` is called then too."""

    async def watch(self) -> None:
        """Wait while all is well. Raises the error of a part that failed; is cancelled at the end."""

    async def drain(self, deadline: Deadline) -> None:
        """Take no new work, and return when the running work is finished or handed back; at the latest by `deadline`.

        Called for all parts at once. Cancellation (a hurried stop) must leave a state that `stop` can end.
        """

    async def stop(self) -> None:
        """End everything at once and free what is held. Called also without `drain`, and after a failed `start`."""


class Tasks:
    """The background tasks of one service: the owner that cancels and awaits them, and reports the first failure.

    A task that returns is done; one that raises is a failure of the service, and `watch` raises it.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[BaseException] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task of this owner. Raises RuntimeError after `close`, so that nothing outlives the owner."""
        if self._closed:
            work.close()
            raise RuntimeError("this owner of tasks is closed")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._failure().done():
            self._failure().set_result(error)

    def _failure(self) -> asyncio.Future[BaseException]:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
        return self._failed

    async def watch(self) -> None:
        """Wait until a task fails, and raise its error; forever if none does."""
        raise await asyncio.shield(self._failure())

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended. Their own errors during that are left to `watch`."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class Shutdown:
    """The wish to stop: `request` once to drain, again to cut the drain short. Safe to call from a signal handler."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def requested(self) -> bool:
        """True from the first request on."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask to stop; a second call asks to hurry."""
        if self._requested.is_set():
            self._hurried.set()
        self._requested.set()

    async def wait(self) -> None:
        """Return at the first request."""
        await self._requested.wait()

    async def wait_hurried(self) -> None:
        """Return at the second request."""
        await self._hurried.wait()


class Stopped(msgspec.Struct, frozen=True):
    """The parts ended because that was asked for."""


class Crashed(msgspec.Struct, frozen=True):
    """A part failed; the others were stopped."""

    service: str
    error: BaseException


Ended = Stopped | Crashed


class Supervisor:
    """Starts the parts in order, watches them, and stops them in reverse. Use once."""

    def __init__(self, services: Sequence[Service], *, drain_timeout_s: float, metrics: Metrics) -> None:
        self._services = tuple(services)
        self._drain_timeout_s = drain_timeout_s
        self._up = metrics.service_up
        self._started: list[Service] = []
        self._ready = False

    @property
    def ready(self) -> bool:
        """True while every part has started and no stop was asked for."""
        return self._ready

    async def run(self, shutdown: Shutdown, *, on_ready: Callable[[], None] | None = None) -> Ended:
        """Start all parts, serve until `shutdown` or a failure, stop all, and say why it ended.

        Errors of `start` pass through once what had started is stopped. Cancellation stops everything without a drain.
        """
        try:
            if not await self._start_unless(shutdown):
                return Stopped()
            self._ready = True
            if on_ready is not None:
                on_ready()
            return await self._serve(shutdown)
        finally:
            self._ready = False
            await self._stop_all()

    async def _start_unless(self, shutdown: Shutdown) -> bool:
        """Start the parts one after the other; return False when a stop was asked for in between."""
        for service in self._services:
            # Entered before it has started: a start that fails half-way needs its stop as well.
            self._started.append(service)
            starting = asyncio.create_task(service.start())
            stopping = asyncio.create_task(shutdown.wait())
            try:
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    return False
                starting.result()
            finally:
                await _cancelled(starting, stopping)
            self._up.labels(service.name).set(1)
            log.debug("service started", service=service.name)
        return True

    async def _serve(self, shutdown: Shutdown) -> Ended:
        watches = {asyncio.create_task(service.watch()): service for service in self._services}
        stopping = asyncio.create_task(shutdown.wait())
        try:
            await asyncio.wait((stopping, *watches), return_when=asyncio.FIRST_COMPLETED)
            crashed = _first_crash(watches)
            if crashed is not None:
                return crashed
            self._ready = False
            return await self._drain(shutdown, watches)
        finally:
            await _cancelled(stopping, *watches)

    async def _drain(self, shutdown: Shutdown, watches: dict[asyncio.Task[None], Service]) -> Ended:
        """Let all parts finish, at most for the drain time-out, until a second request or until one fails."""
        deadline = Deadline(self._drain_timeout_s)
        log.info("draining", timeout_s=self._drain_timeout_s)
        drains = [asyncio.create_task(service.drain(deadline)) for service in reversed(self._services)]
        finished = asyncio.create_task(asyncio.wait(drains))
        hurry = asyncio.create_task(shutdown.wait_hurried())
        try:
            # The margin lets a part that watches the deadline itself finish tidily before it is cut.
            ends: list[asyncio.Task[Any]] = [finished, hurry, *watches]
            await asyncio.wait(ends, timeout=deadline.remaining_s + 1, return_when=asyncio.FIRST_COMPLETED)
            for drain in drains:
                if drain.done() and not drain.cancelled() and (error := drain.exception()) is not None:
                    log.error("drain failed", exc_info=error)
            return _first_crash(watches) or Stopped()
        finally:
            await _cancelled(finished, hurry, *drains)

    async def _stop_all(self) -> None:
        """Stop what was started, last first. One that fails or hangs does not keep the others from stopping."""
        while self._started:
            service = self._started.pop()
            self._up.labels(service.name).set(0)
            try:
                async with asyncio.timeout(STOP_LIMIT_S):
                    await service.stop()
            except Exception as error:  # the next part must be stopped whatever this one did
                log.error("stop failed", service=service.name, exc_info=error)


def _first_crash(watches: dict[asyncio.Task[None], Service]) -> Crashed | None:
    for watch, service in watches.items():
        if watch.done() and not watch.cancelled():
            error = watch.exception() or RuntimeError("the service ended by itself")
            return Crashed(service.name, error)
    return None


async def _cancelled(*futures: asyncio.Task[Any]) -> None:
    """Cancel what is not done, wait for it, and take every error so that none is reported as forgotten."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
