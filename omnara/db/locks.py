"""Advisory locks: who is alive, who leads, who migrates. No statement here ever waits for a lock.

A waiting statement holds a snapshot, which stops pruning and vacuum for the whole database and blocks CREATE INDEX
CONCURRENTLY, so every lock is tried and tried again instead. Source: DESIGN §3 (Who is alive), coordination §1.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, TypeVar
from uuid import UUID

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

K = TypeVar("K")

_SQL: Final = Queries("locks")


def lock_key(namespace: str, name: str) -> int:
    """Return a 63-bit advisory lock key: the head of SHA-256, so that it is the same in every version and process.

    63 bits because the server's type is signed and a positive number is easier to find in `pg_locks`.
    Source: field report B09 (short or unstable hashes collide).
    """
    digest = hashlib.sha256(f"omnara:{namespace}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def worker_key(worker_id: UUID) -> int:
    """Return the key that a worker process holds, shared, on both of its direct connections while it lives."""
    return lock_key("worker", str(worker_id))


async def try_hold(conn: Connection, key: int) -> bool:
    """Try to take `key` exclusively for the life of `conn`'s session. One round trip, no transaction, never waits.

    Session locks count: each success needs its own `release`, or the end of the session.
    """
    return bool(await conn.fetchval(_SQL["try_hold"], key))


async def try_hold_shared(conn: Connection, key: int) -> bool:
    """Like `try_hold`, but sharing the key with other sessions of the same worker."""
    return bool(await conn.fetchval(_SQL["try_hold_shared"], key))


async def release(conn: Connection, key: int) -> bool:
    """Give back one exclusive hold. False when this session had none, which is a bug or a lost session."""
    return bool(await conn.fetchval(_SQL["release"], key))


async def release_all(conn: Connection) -> None:
    """Give back every session lock that this connection holds."""
    await conn.execute(_SQL["release_all"])


async def hold_identity(conn: Connection, key: int, *, timeout_s: float = 2.0) -> bool:
    """Take a worker's own key, shared, on `conn`; both direct connections do this on every (re)connect.

    Tries for up to `timeout_s`, since a prober holds the key exclusively for the length of one statement.
    False means that somebody keeps it exclusively: another process is declaring this worker dead. Cancellation
    leaves at most the lock itself, which ends with the session.
    """
    return await _poll(lambda: try_hold_shared(conn, key), timeout_s, 0.01)


@contextlib.asynccontextmanager
async def held(
    conn: Connection,
    key: int,
    *,
    timeout_s: float,
    poll_s: float = 0.1,
    on_wait: Callable[[], None] | None = None,
) -> AsyncIterator[None]:
    """Hold `key` exclusively on `conn` for the body, taking it by polling.

    `on_wait` is called once when the first try fails. Raises `TimeoutError` after `timeout_s`. On leaving, the lock
    is released, or left to end with a session that is already closed.
    """
    if not await try_hold(conn, key):
        if on_wait is not None:
            on_wait()
        if not await _poll(lambda: try_hold(conn, key), timeout_s, poll_s):
            raise TimeoutError(f"advisory lock {key} stayed taken for {timeout_s:g} s")
    try:
        yield
    finally:
        if not conn.is_closed():
            await release(conn, key)


async def free_keys(conn: Connection, keys: Mapping[K, int]) -> list[K]:
    """Return those whose lock nobody holds, in one statement. Exclusive try-locks, gone when the statement ends.

    Two probers at one moment can each make the other see "held"; the next look corrects that. Leave out your own
    key: a session does not conflict with itself.
    """
    if not keys:
        return []
    names = list(keys)
    rows = await conn.fetch(_SQL["free_keys"], [keys[name] for name in names])
    return [names[row["position"] - 1] for row in rows]


async def _poll(attempt: Callable[[], Awaitable[bool]], timeout_s: float, pause_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await attempt():
        pause = pause_s * random.uniform(0.8, 1.2)
        if loop.time() + pause >= deadline:
            return False
        await asyncio.sleep(pause)
    return True
