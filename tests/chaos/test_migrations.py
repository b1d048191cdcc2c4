"""Eight replicas start at once on an empty database, and the one that migrates is killed half-way."""

from __future__ import annotations

import asyncio

import asyncpg
import psutil
import pytest

from omnara.db.migrate import load_migrations
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.postgres import PostgresForTests
from tests.support.processes import ServerProcess
from tests.support.times import Times
from tests.support.waiting import until

REPLICAS = 8


async def test_one_migrates_and_all_become_ready(
    postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """A half-made schema is repaired by the next in line; each migration is recorded once; no index is invalid."""
    async with postgres.empty() as dsn, Cluster(dsn, tmp_path_factory.mktemp("start"), times) as cluster:
        blocker = await asyncpg.connect(dsn)
        transaction = blocker.transaction()
        await transaction.start()
        # The third migration makes this table, and waits until the name is free: two are applied by then.
        await blocker.execute("create table agents (id int)")
        replicas = [cluster.make("api,worker,maintenance") for _ in range(REPLICAS)]
        for replica in replicas:
            replica.launch()
        victim = await migrating(cluster, replicas)
        victim.kill()
        await transaction.rollback()
        await blocker.close()
        others = [replica for replica in replicas if replica is not victim]
        await asyncio.gather(*(replica.ready() for replica in others))
        rows = await cluster.sql.fetch("select version from schema_migrations order by version")
        assert [row["version"] for row in rows] == [migration.version for migration in load_migrations()]
        assert await cluster.sql.fetchval("select count(*) from orgs") == 1, "one of them set up the organization"
        waiting = [line for replica in others for line in replica.log_lines("migration") if line["what"] == "waiting"]
        assert waiting, "the others waited their turn"
        agent = await cluster.agent(cluster.client(others[-1]), say("fine"))
        await agent.settled()
        await cluster.verify()
        await cluster.end(*others)


async def migrating(cluster: Cluster, replicas: list[ServerProcess]) -> ServerProcess:
    """The replica whose migration waits for the blocked name, found by the port of its connection."""
    port = None

    async def blocked() -> bool:
        nonlocal port
        port = await cluster.sql.fetchval(
            """select client_port from pg_stat_activity where datname = current_database()
               and application_name = 'omnara:admin' and wait_event_type = 'Lock'"""
        )
        return port is not None

    await until(blocked, "somebody migrates", limit_s=60)
    applied = await cluster.sql.fetchval("select count(*) from schema_migrations")
    assert 0 < applied < len(load_migrations())
    for replica in replicas:
        if any(found.laddr.port == port for found in psutil.Process(replica.pid).net_connections("tcp")):
            return replica
    raise AssertionError(f"no replica has a connection from port {port}")
