"""One connection held for one purpose: savers, the claimer, the session.

Such a connection keeps its prepared statements and (the session's) advisory locks, so it must never be shared with a
pool. It is replaced when it breaks, with a back-off short enough for recovery within seconds. Source: DESIGN §3.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import CONNECT_ERRORS, as_unavailable, is_connection_loss

_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
"""Source: coordination §5 rule 2 (reconnect with back-off of at most 1 s)."""

OnConnect = Callable[[Connection], Awaitable[None]]


class Dedicated:
    """Holds at most one connection of `kind`; `use` lends it to one task at a time.

    `on_connect(conn)` runs on every new connection before its first use (take a lock, for instance); when it raises,
    that connection is dropped and the attempt counts as failed. `on_lost()` is called, in the event loop, when the
    connection ends for whatever reason other than `close`. Neither may call `use`.
    """

    def __init__(
        self,
        settings: ConnectSettings,
        kind: ConnKind,
        *,
        on_connect: OnConnect | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings
        self._kind = kind
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._conn: Connection | None = None
        self._closed = False
        self._generation = 0

    @property
    def connected(self) -> bool:
        """Whether there is a connection that is not known to be broken."""
        return self._conn is not None and not self._conn.is_closed()

    @property
    def generation(self) -> int:
        """How many connections there have been; a change means that session state (locks, plans) started anew."""
        return self._generation

    @contextlib.asynccontextmanager
    async def use(self, *, wait_s: float = 10.0) -> AsyncIterator[Connection]:
        """Lend the connection, connecting first if needed; waits at most `wait_s` for its turn and the server.

        Raises `DatabaseUnavailable` when that time passes. What the body raises is passed on unchanged, as the caller
        must tell unknown from definite. After a connection error, a time-out, a cancellation or with a transaction
        left open the connection is cut, and the next `use` makes a new one.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        await self._take_turn(wait_s)
        try:
            conn = self._conn
            if conn is None or conn.is_closed():
                conn = await self._reconnect(deadline)
            try:
                yield conn
            except BaseException as exc:
                if not isinstance(exc, Exception) or isinstance(exc, TimeoutError) or is_connection_loss(exc):
                    conn.terminate()
                raise
            finally:
                if not conn.is_closed() and conn.is_in_transaction():
                    conn.terminate()
        finally:
            self._lock.release()

    async def close(self) -> None:
        """Close for good: politely for 1 s when idle, at once when a task still holds the connection."""
        self._closed = True
        conn, self._conn = self._conn, None
        if conn is None or conn.is_closed():
            return
        if self._lock.locked():
            conn.terminate()
            return
        with contextlib.suppress(*CONNECT_ERRORS):
            await conn.close(timeout=1.0)

    async def _take_turn(self, wait_s: float) -> None:
        """Take the lock; the timer is only paid for when somebody else has it or waits for it."""
        if not self._waiting and not self._lock.locked():
            await self._lock.acquire()
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._lock.acquire()
        except TimeoutError as exc:
            raise as_unavailable(exc, f"the {self._kind} connection stayed busy") from exc
        finally:
            self._waiting -= 1

    async def _reconnect(self, deadline: float) -> Connection:
        """Return a new connection, trying again with growing pauses until `deadline`. Needs the turn."""
        loop = asyncio.get_running_loop()
        pause = _FIRST_BACKOFF_S
        while True:
            if self._closed:
                raise RuntimeError(f"the {self._kind} connection was closed")
            try:
                return await self._open(deadline - loop.time())
            except CONNECT_ERRORS as exc:
                pause = min(pause * 2, _MAX_BACKOFF_S)
                delay = pause * random.uniform(0.5, 1.0)
                if loop.time() + delay >= deadline:
                    raise as_unavailable(exc, "the database cannot be reached") from exc
                await asyncio.sleep(delay)

    async def _open(self, left_s: float) -> Connection:
        conn = await connect(
            self._settings, self._kind, timeout_s=max(0.05, min(left_s, self._settings.connect_timeout_s))
        )
        try:
            if self._on_connect is not None:
                await self._on_connect(conn)
        except BaseException:
            conn.terminate()
            raise
        conn.add_termination_listener(self._ended)
        self._conn = conn
        self._generation += 1
        return conn

    def _ended(self, _conn: Any) -> None:
        """Called by the driver when a connection ends: nothing is raised anywhere otherwise (field report B48)."""
        if self._on_lost is not None and not self._closed:
            self._on_lost()
