"""Queries on `workers`: identities, leases, probes and deaths.

Source: DESIGN §3 "Who is alive", coordination §1 and §3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.failures import is_unavailability
from omnara.db.sqlfiles import Queries

_SQL = Queries("workers")


class Probe(msgspec.Struct, frozen=True):
    """What one look says about a live worker. `gone`: all its connections ended; the one that asks is never `gone`.

    `left_s` is what is left of its lease, on the database's clock: below zero it has run out.
    """

    worker_id: UUID
    gone: bool
    left_s: float
    lease_expires_at: datetime
    attached_at: datetime


class ServerStart(msgspec.Struct, frozen=True):
    """When Postgres started, or last lost all its connections by a crash of one; `age_s` is since then, in seconds."""

    at: datetime
    age_s: float


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


async def probe_workers(connection: Connection, own_id: UUID) -> list[Probe]:
    """Look at every live worker in one statement that never waits (about 0.11 ms, coordination §1.3)."""
    rows = await connection.fetch(_SQL["probe_workers"], own_id)
    return [Probe(*row) for row in rows]


async def declare_dead(
    connection: Connection, gone: Sequence[UUID], lapsed: Sequence[tuple[UUID, datetime]]
) -> list[UUID]:
    """Mark workers dead, judging again inside the statement; returns those that this call declared. Commits by itself.

    `lapsed` are workers with the ends of their leases as they were seen: one that was renewed since is let be.
    Their claims are released by another statement, in a later snapshot (coordination §3.1).
    """
    workers, ends = [worker for worker, _ in lapsed], [end for _, end in lapsed]
    rows = await connection.fetch(_SQL["declare_dead"], list(gone), workers, ends)
    return [row[0] for row in rows]


async def server_start(connection: Connection) -> ServerStart:
    """When this Postgres started, or restarted itself after a crash, on its own clock."""
    row = await connection.fetchrow(_SQL["server_start"])
    assert row is not None, "there is one server"
    return ServerStart(*row)


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
