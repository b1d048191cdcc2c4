"""The identity of a process: held on both direct connections, and kept for as long as the main loop runs."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from omnara.app.hints import HintService
from omnara.app.identity import IdentityService
from omnara.db.connection import ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.locks import worker_key
from omnara.metrics import Metrics
from omnara.worker import Identity, IdentityTimes
from tests.support.waiting import until

TIMES = IdentityTimes(lease_s=5.0, renew_s=0.1, probe_s=0.05, grace_s=0.0)


async def _holders(sql: asyncpg.Connection, worker_id: UUID) -> int:
    key = worker_key(worker_id)
    return int(
        await sql.fetchval(
            """select count(*) from pg_locks
               where locktype = 'advisory' and mode = 'ShareLock' and granted
                 and (classid::bigint << 32) | objid::bigint = $1""",
            key,
        )
    )


async def test_a_new_identity_is_held_on_both_connections(database: str) -> None:
    settings = ConnectSettings(dsn=database)
    identity = Identity(settings, TIMES, ["worker"])
    session = Dedicated(settings, ConnKind.CLAIMER)
    hints = HintService(settings, session, Metrics.create(), on_connect=identity.hold)
    identity.listen(hints)
    service = IdentityService(identity)
    sql = await asyncpg.connect(database)
    try:
        await service.start()
        await hints.start()
        first = identity.worker_id

        async def both() -> bool:
            return await _holders(sql, identity.worker_id) == 2

        await until(both, "the first identity holds its lock twice")
        await sql.execute("update workers set state = 'dead', ended_at = now() where id = $1", first)
        await until(lambda: identity.worker_id != first, "a new identity was made")
        await until(both, "the new identity holds its lock twice")

        async def gone() -> bool:
            return await _holders(sql, first) == 0

        await until(gone, "nobody holds the old identity's lock")
    finally:
        await hints.stop()
        await session.close()
        await service.stop()
        await sql.close()


async def test_a_process_without_a_worker_keeps_its_identity(database: str) -> None:
    """With the role maintenance alone, for instance, which drives machines."""
    times = IdentityTimes(lease_s=0.4, renew_s=0.05, probe_s=0.02, grace_s=0.0)
    identity = Identity(ConnectSettings(dsn=database), times, ["maintenance"])
    service = IdentityService(identity)
    await service.start()
    try:
        first = identity.last_renewal
        await until(lambda: identity.last_renewal > first + 1.2, "it renews for three leases")
    finally:
        await service.stop()


async def test_a_main_loop_that_hangs_is_not_attached_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is lost again and again would keep it alive for ever."""
    identity = Identity(ConnectSettings(dsn=database), TIMES, ["worker"])
    service = IdentityService(identity)
    sql = await asyncpg.connect(database)
    asked, runs = 0, True

    def main_runs() -> bool:
        nonlocal asked
        asked += 1
        return runs

    async def attachments() -> int:
        query = "select count(*) from pg_stat_activity where application_name = 'omnara:session' and datname = $1"
        return int(await sql.fetchval(query, await sql.fetchval("select current_database()")))

    await service.start()
    monkeypatch.setattr(identity, "_main_runs", main_runs)
    try:
        runs = False
        await sql.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
               where application_name = 'omnara:session' and datname = current_database()"""
        )
        looked = asked
        await until(lambda: asked >= looked + 5, "it asks whether anybody is there")
        assert await attachments() == 0
        runs = True

        async def back() -> bool:
            return await attachments() == 1

        await until(back, "it is attached again")
    finally:
        await service.stop()
        await sql.close()
