"""kill -9 of the server that drives containers: their commands run on, once, and another replica tells of their end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest_asyncio

from omnara.machines.providers.docker import DockerProvider
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.docker_engine import BUSYBOX_IMAGE
from tests.support.docker_fleet import insert_machine, remove_everything
from tests.support.machines import bind, queue_command
from tests.support.postgres import PostgresForTests
from tests.support.times import SHRUNK
from tests.support.waiting import until

SETTINGS = {
    "OMNARA_DOCKER_HOST": os.environ.get("OMNARA_DOCKER_HOST", "unix:///var/run/docker.sock"),
    "OMNARA_MACHINE_DRAIN": "300ms",
    "OMNARA_MACHINE_SWEEP": "200ms",
    "OMNARA_DEATH_GRACE": "0",
}


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(postgres: PostgresForTests, provider: DockerProvider, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with postgres.fresh() as dsn:
        installation = ""
        try:
            async with Cluster(dsn, tmp_path, SHRUNK, **SETTINGS) as made:
                (made.front,) = await made.start(1, "api,worker,maintenance")
                yield made
                installation = await made.sql.fetchval("select value from installation where name = 'installation_id'")
        finally:
            if installation:
                await remove_everything(provider, installation)


async def test_three_commands_in_two_containers_outlive_their_server(cluster: Cluster) -> None:
    agent = await cluster.agent(cluster.client(cluster.front), say("fine"))
    project = await cluster.sql.fetchrow("select id, org_id from projects limit 1")
    made = [await insert_machine(cluster.sql, project["org_id"], project["id"], BUSYBOX_IMAGE) for _ in range(2)]
    bound = [await bind(cluster.sql, machine, agent.uuid, kind="pool") for machine in made]

    async def driven() -> bool:
        rows = await cluster.sql.fetch("select worker_id from machines where lifecycle_state = 'active'")
        found = [row["worker_id"] for row in rows]
        return len(found) == 2 and all(one is not None and cluster.front.is_worker(one) for one in found)

    await until(driven, "both are made, and driven by the first", limit_s=20)
    (second,) = await cluster.start(1, "worker,maintenance")
    command = "echo ran >>log; sleep 2; echo over >>log; exit 5"
    commands: list[UUID] = []
    for which in (0, 1, 1):
        queued = await queue_command(cluster.sql, made[which], agent.uuid, bound[which], command, wait_ms=100)
        commands.append(queued)

    async def in_state(state: str) -> bool:
        rows = await cluster.sql.fetch("select state from processes where id = any($1)", commands)
        return [row["state"] for row in rows] == [state] * 3

    await until(lambda: in_state("running"), "all three run", limit_s=20)
    cluster.front.kill()
    assert await in_state("running")
    await until(lambda: in_state("failed"), "all three have ended", limit_s=30)
    rows = await cluster.sql.fetch("select exit_code, reason_code from processes where id = any($1)", commands)
    assert {(row["exit_code"], row["reason_code"]) for row in rows} == {(5, "nonzero_exit")}
    counts = []
    for machine, binding in zip(made, bound, strict=True):
        counted = "[ $(grep -c ran log) = $(grep -c over log) ]; exit $(grep -c ran log)"
        process_id = await queue_command(cluster.sql, machine, agent.uuid, binding, counted, wait_ms=5000)

        async def over(found: UUID = process_id) -> bool:
            return bool(await cluster.sql.fetchval("select closed_at is not null from processes where id = $1", found))

        await until(over, "the log is counted", limit_s=20)
        counts.append(await cluster.sql.fetchval("select exit_code from processes where id = $1", process_id))
    assert counts == [1, 2]
    generations = await cluster.sql.fetch("select generation from machines")
    assert [row["generation"] for row in generations] == [1, 1]
    drivers = {row["worker_id"] for row in await cluster.sql.fetch("select worker_id from machines")}
    assert all(second.is_worker(worker) for worker in drivers)
