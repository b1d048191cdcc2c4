"""Statements of the maintenance service: vacuum of the hot table, and what Postgres says about its own health."""

from __future__ import annotations

import asyncpg

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import as_unavailable
from omnara.db.locks import lock_key, try_hold
from omnara.db.sqlfiles import Queries
from omnara.db.workers import forget_workers

_SQL = Queries("upkeep")
_LEADER = lock_key("leader", "maintenance")


async def vacuum_once(settings: ConnectSettings, every_s: float) -> bool:
    """Vacuum `agent_sched` unless somebody has within `every_s` seconds, or leads at this moment. Takes milliseconds.

    On a connection made for the moment, so that neither a claim nor a request waits behind it; the leader's lock is
    tried and never waited for. Raises DatabaseUnavailable. Cancellation cuts the connection, which ends the vacuum.
    """
    try:
        connection = await connect(settings, ConnKind.ADMIN)
        try:
            if not await connection.fetchval(_SQL["vacuum_due"], every_s) or not await try_hold(connection, _LEADER):
                return False
            await connection.execute(_SQL["vacuum_hot_table"])
            await forget_workers(connection)
            return True
        finally:
            connection.terminate()
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise as_unavailable(error, "the vacuum did not run") from error


async def oldest_xmin_s(connection: Connection) -> float:
    """Age of the oldest transaction that holds vacuum back, in seconds."""
    return float(await connection.fetchval(_SQL["oldest_xmin"]))


async def orphans(connection: Connection) -> tuple[int, float]:
    """How many agents are held by workers that are gone, and for how many seconds the first of those workers has been.

    More than a moment of it means that an agent cannot be released. Source: field-reports B58.
    """
    row = await connection.fetchrow(_SQL["orphans"])
    return (0, 0.0) if row is None else (row["agents"], row["oldest_s"])


async def notify_queue_ratio(connection: Connection) -> float:
    """Use of the NOTIFY queue, 0 to 1."""
    return float(await connection.fetchval(_SQL["notify_queue"]))
