"""The API's four connections: bounded waiting, prompt release, and errors that a client can act on.

The engine's savers, claimer and session hold connections of their own (`omnara.db.dedicated`) and never come here, so
a burst of requests cannot hold up a save. Source: coordination §11.3, §11.5; field report B52.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeVar, cast
from uuid import UUID

import asyncpg

from omnara.clock import monotonic
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import (
    CONNECT_ERRORS,
    DatabaseUnavailable,
    as_unavailable,
    is_connection_loss,
    is_retryable,
    is_unavailability,
)
from omnara.db.fair_share import FairShare, agent_in_work, is_background

T = TypeVar("T")

API_CONNECTIONS: Final = 4
"""Source: coordination §11.5 (nine connections per replica)."""
RETRIES: Final = 3
"""Repeats of a transaction after a deadlock or lock time-out. Source: coordination §9."""
_RELEASE_LIMIT_S: Final = 1.0
_RETRY_BASE_S: Final = 0.01


class ApiPool:
    """A small pool for short API transactions. `start` before use, `close` once; both belong to the owner in `app`.

    A task holds at most one connection at a time (a second acquire raises `RuntimeError`: nesting deadlocks a pool).
    Nothing but SQL may be awaited while one is held. Starting does not need the database to be up.
    """

    def __init__(
        self, settings: ConnectSettings, *, size: int = API_CONNECTIONS, acquire_timeout_s: float = 2.0
    ) -> None:
        self._settings = settings
        self._size = size
        self._acquire_timeout_s = acquire_timeout_s
        self._fair_share = FairShare(max(1, size // 2))
        self._background = asyncio.Semaphore(max(1, size - 1))
        self._holding: set[asyncio.Task[Any]] = set()
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def start(self) -> None:
        """Make the pool. Connections open on first use, so that the process can start while Postgres is away."""
        self._pool = await asyncpg.create_pool(
            min_size=0,
            max_size=self._size,
            max_queries=2**62,
            max_inactive_connection_lifetime=0,
            connect=self._connect,
            reset=_leave_as_is,
            connection_class=Connection,
        )

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Wait up to `timeout_s` for held connections, then cut them. Safe to call twice and before `start`."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), timeout_s)
        except TimeoutError:
            pool.terminate()

    @property
    def in_use(self) -> int:
        """Connections held by tasks at this moment, for metrics."""
        return len(self._holding)

    @property
    def size(self) -> int:
        """The most connections this pool opens."""
        return self._size

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Lend a connection in autocommit; through a pooler the role's defaults apply, so prefer `transaction`.

        Half of the connections, at most, are lent for one agent at a time (`fair_share.work_for`), and all but one to
        the background (`fair_share.in_background`).
        Raises `DatabaseUnavailable` when none is free within the acquire time-out, when the server is away, or when
        the body meets an error that a later repeat may not meet. The connection is always back on leaving, within
        1 s: one that is broken, still in a transaction or slow to cancel its query is cut. Cancellation is passed on.
        """
        agent_id = agent_in_work()
        waits_until = monotonic() + self._acquire_timeout_s
        async with contextlib.AsyncExitStack() as turns:
            if agent_id is not None:
                await turns.enter_async_context(self._turn(agent_id))
            if is_background():
                await self._background_turn(waits_until - monotonic())
                turns.callback(self._background.release)
            async with self._lend(waits_until - monotonic()) as conn:
                yield conn

    async def _background_turn(self, wait_s: float) -> None:
        if not self._background.locked():
            await self._background.acquire()  # at once
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._background.acquire()
        except TimeoutError as exc:
            raise as_unavailable(exc, "no database connection for work in the background became free") from exc

    @contextlib.asynccontextmanager
    async def _turn(self, agent_id: UUID) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._fair_share.turn(agent_id, self._acquire_timeout_s))
            except TimeoutError as exc:
                raise as_unavailable(exc, "too many requests for this agent wait for the database") from exc
            yield

    @contextlib.asynccontextmanager
    async def _lend(self, wait_s: float) -> AsyncIterator[Connection]:
        task = asyncio.current_task()
        if task is None or self._pool is None:
            raise RuntimeError("the pool is used outside a task, or is not started")
        if task in self._holding:
            raise RuntimeError("this task already holds a connection of the pool")
        pool = self._pool
        proxy = await self._take(pool, wait_s)
        self._holding.add(task)
        conn = cast("Connection", proxy)
        try:
            yield conn
        except BaseException as exc:
            if isinstance(exc, TimeoutError) or is_connection_loss(exc):
                _cut(conn)
            if is_unavailability(exc) and not isinstance(exc, DatabaseUnavailable):
                raise as_unavailable(exc, "the database did not answer") from exc
            raise
        finally:
            self._holding.discard(task)
            await self._give_back(pool, proxy)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Lend a connection inside one READ COMMITTED transaction: commit on leaving, roll back on any exception.

        Raises as `acquire` does. An exception out of the commit leaves the outcome unknown.
        """
        async with self.acquire() as conn, conn.transaction(isolation="read_committed"):
            if self._settings.pooled:
                await conn.execute(self._settings.transaction_settings())
            yield conn

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` in a transaction, again up to three times after a deadlock or a lock time-out.

        `work` must have no effect outside the database, since it may run four times. Raises what `work` raises, and
        `DatabaseUnavailable` when the last repeat fails too. Source: coordination §9.
        """
        for attempt in range(RETRIES + 1):
            try:
                async with self.transaction() as conn:
                    return await work(conn)
            except DatabaseUnavailable as exc:
                cause = exc.__cause__
                if attempt == RETRIES or cause is None or not is_retryable(cause):
                    raise
            await asyncio.sleep(_RETRY_BASE_S * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    async def _connect(self, *_args: Any, **_kwargs: Any) -> Connection:
        return await connect(self._settings, ConnKind.API)

    async def _take(self, pool: asyncpg.Pool[asyncpg.Record], wait_s: float) -> Any:
        try:
            return await pool.acquire(timeout=max(wait_s, 0.0))
        except TimeoutError as exc:
            raise as_unavailable(exc, "no database connection became free") from exc
        except CONNECT_ERRORS as exc:
            raise as_unavailable(exc, "the database cannot be reached") from exc

    async def _give_back(self, pool: asyncpg.Pool[asyncpg.Record], proxy: Any) -> None:
        _cut(cast("Connection", proxy), only_in_transaction=True)
        # The driver waits here for its own cancel request; on a cut network that would last as long as the cut.
        # It cuts the connection itself when the limit passes, so there is nothing left to do for us.
        with contextlib.suppress(*CONNECT_ERRORS):
            await pool.release(proxy, timeout=_RELEASE_LIMIT_S)


async def _leave_as_is(conn: Any) -> None:
    """Stand in for the driver's reset, whose extra round trip costs 20 to 29 % of a small query.

    Nothing here relies on session state that a reset would have to clean. Source: coordination §11.3.
    """
    if conn.is_in_transaction():
        conn.terminate()


def _cut(conn: Connection, *, only_in_transaction: bool = False) -> None:
    """End a lent connection; one that ended by itself is out of the driver's pool already and refuses every call."""
    with contextlib.suppress(asyncpg.InterfaceError):
        if not only_in_transaction or conn.is_in_transaction():
            conn.terminate()
