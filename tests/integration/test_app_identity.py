"""The identity's second lock: a process that was declared dead holds its new key on both direct connections."""

from __future__ import annotations

from uuid import UUID

import asyncpg

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
