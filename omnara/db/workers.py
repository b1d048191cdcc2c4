"""Queries on `workers`: identities, leases, probes and deaths.

Source: DESIGN §3 "Who is alive", coordination §1 and §3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.failures import is_unavailability
from omnara.db.sqlfiles import Queries

_SQL = Queries("workers")


class Probe(msgspec.Struct, frozen=True):
    """What one look says about a worker. `gone`: all its connections ended; `expired`: its lease ran out.

    `seen`: it attached itself or renewed since this Postgres was started. The own row is never `gone`.
    """

    worker_id: UUID
    gone: bool
    expired: bool
    seen: bool


async def register_worker(
    connection: Connection, worker_id: UUID, *, lock_key: int, roles: Sequence[str], version: str, lease_s: float
) -> None:
    """Insert a new live worker with a lease of `lease_s` seconds on the database's clock."""
    await connection.execute(_SQL["register_worker"], worker_id, lock_key, list(roles), version, lease_s)


async def renew_lease(connection: Connection, worker_id: UUID, lease_s: float) -> bool:
    """Extend the lease; False means that somebody declared this worker dead."""
    return await connection.fetchval(_SQL["renew_lease"], worker_id, lease_s) is not None


async def reattach_worker(connection: Connection, worker_id: UUID, lease_s: float) -> bool:
    """Take the identity up again after its session was lost; False means declared dead meanwhile."""
    return await connection.fetchval(_SQL["reattach_worker"], worker_id, lease_s) is not None


async def stop_worker(connection: Connection, worker_id: UUID) -> None:
    """Record an orderly end."""
    await connection.execute(_SQL["stop_worker"], worker_id)


async def probe_workers(connection: Connection, own_id: UUID, lease_s: float) -> list[Probe]:
    """Look at every live worker in one statement that never waits (about 0.11 ms, coordination §1.3).

    `lease_s` is how long a lease is: when one was last renewed is told by when it runs out.
    """
    rows = await connection.fetch(_SQL["probe_workers"], own_id, lease_s)
    return [Probe(*row) for row in rows]


async def declare_dead(connection: Connection, gone: Sequence[UUID], expired: Sequence[UUID]) -> list[UUID]:
    """Mark workers dead, judging again inside the statement; returns those that this call declared. Commits by itself.

    Their claims are released by another statement, in a later snapshot (coordination §3.1).
    """
    rows = await connection.fetch(_SQL["declare_dead"], list({*gone, *expired}), list(expired))
    return [row[0] for row in rows]


async def postmaster_age(connection: Connection) -> float:
    """Seconds since this Postgres started, on its own clock."""
    age: float = await connection.fetchval(_SQL["postmaster_age"])
    return age


async def promotion_age(connection: Connection) -> float:
    """Seconds since somebody found this database promoted, on its own clock; very many if it never was.

    A promoted standby has been running for long, and has none of the locks that say who is alive: they do not
    replicate. Whoever comes first notes the change, in a transaction of its own; a later one makes it no younger.
    """
    try:
        await connection.execute(_SQL["note_timeline"])
    except asyncpg.PostgresError as error:
        if is_unavailability(error):
            raise
        return math.inf  # a service that keeps its timeline to itself: its promotions look like restarts, if at all
    age: float = await connection.fetchval(_SQL["timeline_age"])
    return age


async def forget_workers(connection: Connection) -> None:
    """Delete rows of workers that ended more than a day ago and hold no claim."""
    await connection.execute(_SQL["forget_workers"])


async def workers_alive(connection: Connection) -> int:
    """Return the number of live workers."""
    alive: int = await connection.fetchval(_SQL["workers_alive"])
    return alive
