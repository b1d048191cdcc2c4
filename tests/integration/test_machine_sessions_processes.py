"""Machines of servers that are real processes: one is killed, one is told to stop, and no command is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest_asyncio

from omnara.ids import IdKind, encode
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.machines import TestMachine, bind, make_machine, queue_command, raw_daemon
from tests.support.processes import ServerProcess
from tests.support.times import SHRUNK
from tests.support.waiting import until

ROLES = "api,worker,maintenance"
SETTINGS = {
    "OMNARA_MACHINE_HEARTBEAT": "1s",
    "OMNARA_MACHINE_LEASE": "30s",
    "OMNARA_MACHINE_DRAIN": "500ms",
    "OMNARA_MACHINE_SWEEP": "200ms",
    "OMNARA_DEATH_GRACE": "0",
}


class Scene:
    """Two replicas, and an agent with a machine."""

    def __init__(self, cluster: Cluster, servers: list[ServerProcess], machine: TestMachine, agent_id: UUID, b: UUID):
        self.cluster = cluster
        self.a, self.b = servers
        self.machine = machine
        self.agent_id = agent_id
        self.binding = b

    async def queue(self, command: str) -> UUID:
        """Queue a command; nobody is told of it, so the sweep finds it."""
        return await queue_command(self.cluster.sql, self.machine, self.agent_id, self.binding, command, wait_ms=200)

    async def process(self, process_id: UUID) -> Any:
        """The row of a process."""
        return await self.cluster.sql.fetchrow("select * from processes where id = $1", process_id)

    async def connection(self) -> str:
        """Whether the machine is online."""
        query = "select state from machine_connections where machine_id = $1"
        return str(await self.cluster.sql.fetchval(query, self.machine.id))


@pytest_asyncio.fixture(loop_scope="session")
async def scene(database: str, tmp_path: Path) -> AsyncIterator[Scene]:
    async with Cluster(database, tmp_path, SHRUNK, **SETTINGS) as cluster:
        servers = await cluster.start(1, ROLES)
        servers += await cluster.start(1, ROLES)
        agent = await cluster.agent(cluster.client(servers[0]), say("fine"))
        project = await cluster.sql.fetchrow("select id, org_id from projects limit 1")
        machine = await make_machine(cluster.sql, project["org_id"], project["id"])
        yield Scene(cluster, servers, machine, agent.uuid, await bind(cluster.sql, machine, agent.uuid))
        await cluster.verify()


def claim(public: str) -> dict[str, Any]:
    """What a daemon says of a command that runs on."""
    return {
        "process_id": public,
        "supervisor_instance_id": "one",
        "phase": "accepted",
        "supervisor_live": True,
        "execution_committed": True,
        "action_admission_closed": False,
        "resolved_action_seq": 0,
        "actions": [],
    }


async def test_a_killed_replica_with_the_channel(scene: Scene) -> None:
    """Its machine is offline at once, connects to the other replica, and what was told twice counts once."""
    async with raw_daemon(scene.a.url, scene.machine) as daemon:
        process_id = await scene.queue("true")
        public = await daemon.take(process_id)
        assert (await daemon.started(public))["ack_status"] == "committed"
        assert await scene.connection() == "online"
        scene.a.kill()
        assert await daemon.closed() == 1006

        async def offline() -> bool:
            return await scene.connection() == "offline"

        await until(offline, "the machine is offline long before its lease is over", limit_s=8)
        daemon.url = scene.b.url
        answer = await daemon.register([claim(public)])
        assert [found["disposition"] for found in answer["reconciliation"]["processes"]] == ["retain"]
        await daemon.connect()
        assert await scene.connection() == "online"
        first = await daemon.finished(public)
        before = await scene.process(process_id)
        again = await daemon.finished(public, "again")
        assert (first["ack_status"], again["ack_status"]) == ("committed", "committed")
        assert await scene.process(process_id) == before
        assert (before["state"], before["exit_code"]) == ("exited", 0)


async def test_a_replica_that_is_told_to_stop(scene: Scene) -> None:
    """Its channels close within a second, whatever else it still has to finish."""
    async with raw_daemon(scene.a.url, scene.machine) as daemon:
        loop = asyncio.get_running_loop()
        started = loop.time()
        scene.a.signal(signal.SIGTERM)
        assert await daemon.closed() == 1001
        assert loop.time() - started < 1
        daemon.url = scene.b.url
        await daemon.register()
        await daemon.connect()
        process_id = await scene.queue("true")
        public = await daemon.take(process_id)
        assert public == encode(IdKind.PROCESS, process_id)
        assert await scene.a.exited() == 0
