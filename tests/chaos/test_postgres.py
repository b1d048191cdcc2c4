"""Postgres goes away under load, three times, and loses its listeners and locks: everything recovers by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import psutil
import pytest

from omnara.client import Client
from omnara.db.embedded import EmbeddedPostgres
from omnara.testing import say
from tests.support.cluster import MODEL, Cluster
from tests.support.load import Load
from tests.support.processes import ServerProcess
from tests.support.times import Times
from tests.support.waiting import until

RECOVERY_S = 30.0


async def test_three_restarts_and_cut_sessions_under_load(
    own_postgres: EmbeddedPostgres,
    tmp_path_factory: pytest.TempPathFactory,
    times: Times,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped in order, killed, and crashed; nothing is lost, doubled or repeated, since no process of ours died."""
    async with Cluster(own_postgres.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        replicas = await cluster.start(3, "api,worker,maintenance")
        clients = [cluster.client(replica) for replica in replicas]
        identities = [replica.worker_id for replica in replicas]
        long = await cluster.agent(clients[0], say("one long answer"), gate="mid_text")
        await long.gate.reached(30)
        load = Load(cluster, "restarts")
        await load.begin(clients, 12)
        waits = []
        for how in (signal.SIGINT, signal.SIGKILL, signal.SIGQUIT):
            await load.goes_on(within_s=RECOVERY_S)
            end_postgres(own_postgres, how)
            await own_postgres.stop()
            await refused_politely(cluster, replicas[0])
            await own_postgres.start()
            waits.append(await recovered(load, clients[0]))
        await cut_sessions(cluster, load)
        long.gate.release()
        await load.end()
        await long.settled()
        assert await long.texts() == ["one long answer"]
        assert len(long.requests) == 1, "a model call in flight is not repeated while its process lives"
        await load.check(undisturbed=True)
        assert [replica.worker_id for replica in replicas] == identities, "losing a connection is not death"
        assert {await cluster.worker_state(worker) for worker in identities} == {"live"}
        await cluster.verify()
        await cluster.end(*replicas)
    with capsys.disabled():
        print(f"\n  steps go on after a Postgres restart: {', '.join(f'{wait:.1f} s' for wait in waits)}")


async def test_a_standstill_longer_than_the_lease_is_nobodys_death(
    own_postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """Storage that hangs, or a machine that is moved: every lease runs out at once, and no connection is lost."""
    async with Cluster(own_postgres.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        replicas = await cluster.start(3, "api,worker,maintenance", times.short_lease)
        identities = [replica.worker_id for replica in replicas]
        load = Load(cluster, "standstill")
        await load.begin([cluster.client(replica) for replica in replicas], 12)
        await load.goes_on()
        async with standstill(own_postgres):
            await asyncio.sleep(times.lease_s * 4 / 3)  # the length of the standstill, not a wait for something
        await load.goes_on(within_s=RECOVERY_S)
        await renewed_for(cluster, times.lease_s)  # by then everybody judges leases again
        await load.end()
        await load.check(undisturbed=True)
        assert {await cluster.worker_state(worker) for worker in identities} == {"live"}
        await cluster.verify()
        await cluster.end(*replicas)


async def test_a_new_process_after_a_crash_of_one_backend_judges_nobody(
    own_postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """Postgres cuts everybody off and goes on under the same start; those that are not back yet live all the same."""
    directory = tmp_path_factory.mktemp("cluster")
    async with Cluster(own_postgres.dsn, directory, times, OMNARA_WORKER_LEASE="30s") as cluster:
        replicas = await cluster.start(2, "api,worker,maintenance")
        identities = [replica.worker_id for replica in replicas]
        load = Load(cluster, "backend")
        await load.begin([cluster.client(replica) for replica in replicas], 6)
        await load.goes_on()
        query = "select pid from pg_stat_activity where application_name = 'omnara:saver' limit 1"
        victim = int(await cluster.sql.fetchval(query))
        for replica in replicas:
            replica.signal(signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        try:
            (new,) = await cluster.start(1, "worker,maintenance")
        finally:
            for replica in replicas:
                replica.signal(signal.SIGCONT)
        await load.goes_on(within_s=RECOVERY_S)
        await load.end()
        await load.check(undisturbed=True)
        assert {await cluster.worker_state(worker) for worker in identities} == {"live"}
        assert not new.log_lines("workers_declared_dead")
        await cluster.verify()
        await cluster.end(*replicas, new)


@contextlib.asynccontextmanager
async def standstill(server: EmbeddedPostgres) -> AsyncIterator[None]:
    """No process of the server runs meanwhile; it takes connections and answers nothing."""
    assert server.pid is not None
    postmaster = psutil.Process(server.pid)
    postmaster.suspend()  # first, so that it makes no more children
    stopped = [postmaster, *postmaster.children()]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            process.resume()


async def renewed_for(cluster: Cluster, seconds: float) -> None:
    """Wait until every worker has renewed its lease for so long from now on."""
    end = await cluster.sql.fetchval("select max(lease_expires_at) from workers where state = 'live'")
    query = """select min(lease_expires_at) >= $1::timestamptz + make_interval(secs => $2)
               from workers where state = 'live'"""

    async def there() -> bool:
        return bool(await cluster.sql.fetchval(query, end, seconds))

    await until(there, "all leases are renewed", limit_s=2 * seconds + 20)


def end_postgres(server: EmbeddedPostgres, how: int) -> None:
    """Stop the server in order, kill it with all its children, or let it crash."""
    assert server.pid is not None
    if how == signal.SIGKILL:
        children = psutil.Process(server.pid).children()
        os.kill(server.pid, how)
        psutil.wait_procs(children, timeout=15)
    else:
        os.kill(server.pid, how)


async def refused_politely(cluster: Cluster, replica: ServerProcess) -> None:
    """While Postgres is away requests get 503 with Retry-After, the process stays healthy and is not ready."""
    timeout = aiohttp.ClientTimeout(total=15)
    async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {cluster.key}"}) as session:
        async with session.post(f"{replica.url}/agents", json={"model": MODEL, "system_prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["code"] == "service_unavailable"
        async with session.get(f"{replica.ops_url}/healthz") as response:
            assert response.status == 200
    assert await replica.readyz() == 503


async def recovered(load: Load, client: Client) -> float:
    """Seconds until all agents go on and the API answers, without anybody's help."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await load.goes_on(within_s=RECOVERY_S)
    await client.status(load.agents[0].id)
    return loop.time() - started


async def cut_sessions(cluster: Cluster, load: Load) -> None:
    """Terminate every listener and every holder of an advisory lock, again and again; then every connection."""
    everything = ["session", "listen", "claimer", "saver", "api", "admin"]
    for kinds in (["session"], ["listen"], ["session", "listen"], everything):
        names = [f"omnara:{kind}" for kind in kinds]
        connection = await asyncpg.connect(cluster.dsn)
        try:

            async def all_there(connection: asyncpg.Connection = connection) -> bool:
                query = "select count(*) from pg_stat_activity where application_name = any($1)"
                return bool(await connection.fetchval(query, ["omnara:session", "omnara:listen"]) == 6)

            await until(all_there, "all three have come back", limit_s=RECOVERY_S)
            cut = await connection.fetchval(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = any($1)", names
            )
        finally:
            await connection.close()
        assert cut >= 3
        await load.goes_on(within_s=RECOVERY_S)
