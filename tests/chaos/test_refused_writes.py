"""Postgres answers but takes nothing: read-only for longer than a lease, then on a full disk. Field report B55."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import asyncpg
import psutil
import pytest
import pytest_asyncio

from omnara.db.embedded import EmbeddedPostgres
from omnara.testing import say
from tests.chaos.test_postgres import RECOVERY_S, refused_politely
from tests.support.cluster import MODEL, Cluster
from tests.support.load import Load
from tests.support.processes import ServerProcess
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.times import Times
from tests.support.waiting import until

MOST_LINES = 120
"""What one process may log meanwhile, however long it lasts, without lines of requests: the log may be on that disk."""


async def test_read_only_for_longer_than_a_lease(
    own_postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """No session is killed, all refuse to write: nothing new begins, what is finished is kept, and saved afterwards."""
    hold_s = times.lease_s + 1
    async with Cluster(own_postgres.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        replicas = await cluster.start(2, "api,worker,maintenance", times.short_lease)
        identities = [replica.worker_id for replica in replicas]
        clients = [cluster.client(replica) for replica in replicas]
        long = await cluster.agent(clients[0], say("answered while nothing could be saved"), gate="mid_text")
        await long.gate.reached(30)
        load = Load(cluster, "read-only")
        await load.begin(clients, 8)
        load.follow(2)
        await load.goes_on(within_s=RECOVERY_S)
        await read_only(own_postgres, on=True)
        for replica in replicas:
            await refused_politely(cluster, replica)
        before = [len(lines(replica)) for replica in replicas]
        recorded = await recorded_steps(cluster.sql)
        long.gate.release()
        await asyncio.wait_for(stays(cluster, recorded, hold_s), hold_s + 25)
        await nothing_unrecorded(cluster, cluster.sql)
        for replica, was in zip(replicas, before, strict=True):
            written = lines(replica)[was:]
            assert len(written) < MOST_LINES, written[-20:]
        await read_only(own_postgres, on=False)
        await load.goes_on(within_s=RECOVERY_S)
        launched = await cluster.agent(clients[1], say("launched afterwards"))
        await load.end()
        for agent in (long, launched):
            await agent.settled()
            assert len(agent.requests) == 1
        assert await long.texts() == ["answered while nothing could be saved"]
        await load.check(undisturbed=True)
        assert [replica.worker_id for replica in replicas] == identities, "a server that refuses is not a death"
        assert {await cluster.worker_state(worker) for worker in identities} == {"live"}
        await cluster.verify()
        await cluster.end(*replicas)


async def read_only(server: EmbeddedPostgres, *, on: bool) -> None:
    """Let all sessions, old and new, begin read-only transactions, or end that."""
    connection = await asyncpg.connect(server.dsn)
    try:
        change = "set default_transaction_read_only = on" if on else "reset default_transaction_read_only"
        await connection.execute(f"alter system {change}")
        await connection.execute("select pg_reload_conf()")

        async def there() -> bool:
            return bool(await connection.fetchval("show transaction_read_only") == ("on" if on else "off"))

        await until(there, "the setting holds")
    finally:
        await connection.close()


async def recorded_steps(sql: asyncpg.Pool | asyncpg.Connection) -> int:
    """How many steps the database knows."""
    return int(await sql.fetchval("select count(*) from steps"))


async def stays(cluster: Cluster, steps: int, seconds: float) -> None:
    """Watch for so long that no step begins."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def over() -> bool:
        assert await recorded_steps(cluster.sql) == steps, "nothing can begin"
        return loop.time() >= end

    await until(over, "the time is over", limit_s=seconds + 15)


async def nothing_unrecorded(cluster: Cluster, sql: asyncpg.Pool | asyncpg.Connection) -> None:
    """No model was asked and no page was fetched without a step in the database that says so."""
    effects = sum(len(agent.requests) for agent in cluster.agents) + sum(cluster.page.hits.values())
    assert effects <= await recorded_steps(sql)


def lines(replica: ServerProcess) -> list[str]:
    """What a process has logged, without the lines of single requests."""
    return [line for line in replica.log_file.read_text().splitlines() if '"event":"request"' not in line]


@pytest_asyncio.fixture(loop_scope="session")
async def tight_postgres(own_directory: Path, pg_bin: Path | None) -> AsyncIterator[tuple[SmallDisk, EmbeddedPostgres]]:
    """A server whose data and write-ahead log lie on a disk of 128 MB."""
    settings = {"synchronous_commit": "on", "max_wal_size": "64MB", "min_wal_size": "32MB"}
    with small_disk(own_directory.parent / "disk", 128) as disk:
        server = EmbeddedPostgres(disk.path / "data", bin_dir=pg_bin, durable=False, extra_settings=settings)
        await server.start()
        try:
            yield disk, server
        finally:
            await server.stop()


async def test_full_disk(
    tight_postgres: tuple[SmallDisk, EmbeddedPostgres], tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """First tables cannot grow, then the write-ahead log cannot, at which Postgres ends. Twice, room is made again."""
    disk, server = tight_postgres
    hold_s = 30.0 if times.name == "default" else 2.0
    async with Cluster(server.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        replicas = await cluster.start(2, "api,worker,maintenance")
        identities = [replica.worker_id for replica in replicas]
        clients = [cluster.client(replica) for replica in replicas]
        long = await cluster.agent(clients[0], say("answered while there was no room"), gate="mid_text")
        await long.gate.reached(30)
        load = Load(cluster, "full", delay_ms=50)
        await load.begin(clients, 8)
        load.follow(2)
        await load.goes_on(within_s=RECOVERY_S)
        before = [len(lines(replica)) for replica in replicas]
        watcher = await asyncpg.connect(server.dsn)  # there may be no room for what a new session writes
        await until(lambda: all_work(load, replicas), "both have something to save")
        disk.fill()
        await until(lambda: all(refusals(replica) for replica in replicas), "saves are refused", limit_s=60)
        await until_refused(cluster, replicas)
        long.gate.release()
        await stays_full(disk, hold_s)
        await nothing_unrecorded(cluster, watcher)
        watcher.terminate()
        for replica, was in zip(replicas, before, strict=True):
            assert len(lines(replica)) - was < MOST_LINES, lines(replica)[-20:]
        disk.free()
        await load.goes_on(within_s=RECOVERY_S)
        await until_it_ends(disk, server)
        await refused_politely(cluster, replicas[0])
        await server.stop()
        disk.free()
        await server.start()
        await load.goes_on(within_s=RECOVERY_S)
        await load.end()
        await long.settled()
        assert (await long.texts(), len(long.requests)) == (["answered while there was no room"], 1)
        await load.check(undisturbed=True)
        assert [replica.worker_id for replica in replicas] == identities
        await cluster.verify()
        await cluster.end(*replicas)


async def all_work(load: Load, replicas: list[ServerProcess]) -> bool:
    """Whether each of these processes runs an agent of the load: after a standstill one may have them all."""
    running = {(await agent.hot())["worker_id"] for agent in load.agents}
    return {replica.worker_id for replica in replicas} <= running


def refusals(replica: ServerProcess) -> list[str]:
    """The log lines of saves that found the disk full."""
    return [line for line in lines(replica) if "DiskFullError" in line]


async def until_refused(cluster: Cluster, replicas: list[ServerProcess]) -> None:
    """Wait until launches are answered with 503, at every replica."""
    headers = {"Authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15), headers=headers) as session:
        for replica in replicas:

            async def refused(url: str = f"{replica.url}/agents") -> bool:
                body = {"model": MODEL, "system_prompt": "y" * 8_000}
                async with session.post(url, json=body) as response:
                    assert response.status in (201, 503), await response.text()
                    return response.status == 503 and int(response.headers["Retry-After"]) >= 1

            await until(refused, "a launch is refused", limit_s=30)


async def stays_full(disk: SmallDisk, seconds: float) -> None:
    """Take what is given back, for so long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    def over() -> bool:
        disk.fill()
        return loop.time() >= end

    await until(over, "the time is over", limit_s=seconds + 5)


async def until_it_ends(disk: SmallDisk, server: EmbeddedPostgres) -> None:
    """Fill the disk and use up the segments of the write-ahead log, until the server has ended by itself.

    Without checkpoints: each makes old segments the next ones, and a server that is quick with them never ends.
    """
    assert server.pid is not None
    process = psutil.Process(server.pid)
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("alter system set max_wal_size = '10GB'")
    await connection.execute("select pg_reload_conf()")
    await connection.close()

    async def ended() -> bool:
        disk.fill()
        try:
            connection = await asyncpg.connect(server.dsn, timeout=2)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        try:
            # What is written must be no table: that there is no room for one is refused, before any segment is used.
            await connection.execute("select pg_logical_emit_message(false, 'full', 'x'); select pg_switch_wal()")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        finally:
            connection.terminate()
        return False

    await until(ended, "the server has ended", limit_s=60)
