"""Who this process is, and who else is alive: a thread that keeps the lease and looks at the other workers.

It has its own event loop and its own connection (the session), so that a busy main loop neither loses the lease nor
misses a death. The identity is re-attachable: losing the connection is not death. What the thread learns reaches the
main loop through `IdentityEvents`, called there.
Source: DESIGN §3 "Who is alive", coordination §1, §5 (rules 1 to 5) and §11.8; field-reports B08, B09.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol
from uuid import UUID

from omnara import __version__
from omnara.clock import Backoff, jittered, monotonic
from omnara.db import workers as db
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.locks import hold_identity, release_all, worker_key
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.worker.verdicts import IdentityTimes, Verdicts

log = get_logger(__name__)


class IdentityEvents(Protocol):
    """What the main loop wants to hear. Every method is called in the main loop, in order, and must not block."""

    def attached(self, worker_id: UUID, *, is_new: bool) -> None:
        """The identity holds its lock and its row is live; `is_new` when it is another one than before."""

    def detached(self) -> None:
        """The session is gone: no new claims and no new effects until `attached`."""

    def declared_dead(self, worker_id: UUID) -> None:
        """This worker was declared dead: cancel everything; a new identity follows by `attached`."""

    def deaths(self, worker_ids: Sequence[UUID]) -> None:
        """Other workers were declared dead: their claims can be released now."""


class Identity:
    """Owns the thread. `start` returns once the first identity is attached; `stop` ends the thread and its session.

    `main_alive` tells when the main loop last ran: a loop that is stuck for two leases stops the renewal, so that a
    process that hangs with its connections open is not taken for a living one.
    """

    def __init__(
        self,
        settings: ConnectSettings,
        times: IdentityTimes,
        roles: Sequence[str],
    ) -> None:
        self._settings = settings
        self._times = times
        self.verdicts = Verdicts(times)
        self._roles = tuple(sorted(roles))
        self._listeners: list[IdentityEvents] = []
        self._main: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._failed: BaseException | None = None
        self._first = asyncio.Event()
        self._ended = asyncio.Event()
        self.worker_id: UUID = new_uuid()
        self.last_renewal = monotonic()
        self.main_alive = monotonic()

    def listen(self, listener: IdentityEvents) -> None:
        """Tell this listener from now on. Call in the main loop."""
        self._listeners.append(listener)

    async def start(self, timeout_s: float = 30.0) -> None:
        """Start the thread and wait for the first attachment. Raises TimeoutError, or what ended the thread."""
        self._main = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run_thread, name="omnara-identity", daemon=True)
        self._thread.start()
        async with asyncio.timeout(timeout_s):
            await self._first.wait()
        if self._failed is not None:
            raise self._failed

    async def stop(self) -> None:
        """End the thread: the row becomes `stopped`, the locks go with the session. Call after the last save."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        async with asyncio.timeout(5.0):
            await self._ended.wait()
        self._thread = None

    async def watch(self) -> None:
        """Wait until the thread ends, then raise what ended it; for the supervisor."""
        await self._ended.wait()
        if self._failed is not None:
            raise self._failed

    async def hold(self, connection: Connection) -> None:
        """`on_connect` of the LISTEN connection: it shares the lock, so one lost connection is not a death."""
        if not await hold_identity(connection, worker_key(self.worker_id)):
            log.warning("identity_lock_taken", worker_id=str(self.worker_id))

    # --- in the thread ---------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._live())
        except BaseException as error:  # noqa: BLE001 - handed to the main loop, where the supervisor ends the process
            self._failed = error
        finally:
            self._tell(self._first.set)
            self._tell(self._ended.set)

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        backoff = Backoff(0.05, 1.0)
        registered = False
        while not self._stop.is_set():
            try:
                connection = await connect(self._settings, ConnKind.SESSION)
            except Exception as error:  # noqa: BLE001 - whatever keeps the session away, it is tried again
                log.warning("session_unavailable", error=type(error).__name__)
                await self._pause(backoff.next_s())
                continue
            try:
                registered = await self._attach(connection, registered)
                if registered:
                    backoff.reset()
                    await self._serve(connection)
            except Exception as error:  # noqa: BLE001 - the session broke; the identity is attached again
                log.warning("session_lost", error=type(error).__name__)
            finally:
                await self._leave(connection, registered)
            if not self._stop.is_set():
                self._each(lambda listener: listener.detached())
                await self._pause(backoff.next_s())

    async def _attach(self, connection: Connection, registered: bool) -> bool:
        """Take the lock, then the row; makes a new identity after a death. Returns True once there is one.

        Raises ConnectionError when the key stays taken: somebody is judging this worker; the next session looks again.
        """
        started = monotonic()
        await db.promotion_age(connection)  # so that the grace after a failover counts from the first contact
        if not registered:
            await self._register(connection)
        elif not await hold_identity(connection, worker_key(self.worker_id)):
            raise ConnectionError("the identity's key is taken")
        elif not await db.reattach_worker(connection, self.worker_id, self._times.lease_s):
            dead = self.worker_id
            self.worker_id = new_uuid()
            self._each(lambda listener: listener.declared_dead(dead))
            await release_all(connection)  # the dead identity's key
            await self._register(connection)
        else:
            worker_id = self.worker_id
            self._each(lambda listener: listener.attached(worker_id, is_new=False))
        self.verdicts.attached(again=registered)
        self.last_renewal = started
        return True

    async def _register(self, connection: Connection) -> None:
        key = worker_key(self.worker_id)
        if not await hold_identity(connection, key):
            raise RuntimeError("a new identity's lock is already taken")
        await db.register_worker(
            connection,
            self.worker_id,
            lock_key=key,
            roles=self._roles,
            version=__version__,
            lease_s=self._times.lease_s,
        )
        worker_id = self.worker_id
        log.info("worker_registered", worker_id=str(worker_id))
        self._each(lambda listener: listener.attached(worker_id, is_new=True))
        self._tell(self._first.set)

    async def _serve(self, connection: Connection) -> None:
        """Probe and renew until the session breaks, somebody declares this worker dead, or the end."""
        assert self._stop is not None
        next_renewal = monotonic() + jittered(self._times.renew_s)
        while not self._stop.is_set():
            if connection.is_closed():
                raise ConnectionError("the session ended")
            live = await self._look_around(connection)
            if self._main_runs():
                if not live:
                    return  # declared dead: `_attach` finds no row and makes a new identity
                if monotonic() >= next_renewal:
                    await self._renew(connection)
                    next_renewal = monotonic() + jittered(self._times.renew_s)
            await self._pause(jittered(self._times.probe_s))

    async def _renew(self, connection: Connection) -> None:
        """Renew the lease; the next look finds out when there was none left to renew."""
        started = monotonic()
        if await db.renew_lease(connection, self.worker_id, self._times.lease_s):
            self.last_renewal = started

    def _main_runs(self) -> bool:
        return monotonic() - self.main_alive < 2 * self._times.lease_s

    async def _look_around(self, connection: Connection) -> bool:
        """One look at all workers; tells of those that it declared dead. False when this one is no longer live."""
        live, dead = await self.verdicts.look(connection, self.worker_id)
        if dead:
            log.warning("workers_declared_dead", workers=[str(worker) for worker in dead])
            self._each(lambda listener: listener.deaths(dead))
        return live

    async def _leave(self, connection: Connection, registered: bool) -> None:
        assert self._stop is not None
        try:
            if self._stop.is_set() and registered and not connection.is_closed():
                await db.stop_worker(connection, self.worker_id)
                await connection.close(timeout=1.0)
        except Exception as error:  # noqa: BLE001 - the row will be declared dead instead of stopped
            log.warning("worker_not_signed_off", error=type(error).__name__)
        finally:
            connection.terminate()

    async def _pause(self, seconds: float) -> None:
        assert self._stop is not None
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return

    def _each(self, call: Callable[[IdentityEvents], None]) -> None:
        def tell_all() -> None:
            for listener in self._listeners:
                call(listener)

        self._tell(tell_all)

    def _tell(self, call: Callable[[], None]) -> None:
        if self._main is not None and not self._main.is_closed():
            self._main.call_soon_threadsafe(call)
