"""Machines of servers that are real processes: one is killed, one is told to stop, and no command is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from omnara.ids import IdKind, encode
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.daemon_process import DaemonProcess, running
from tests.support.machines import TestMachine, bind, make_machine, process_claim, queue_command, raw_daemon
from tests.support.postgres import PostgresForTests
from tests.support.processes import ServerProcess
from tests.support.tcp_proxy import TcpProxy
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One replica that stays; tests kill the other one."""
    directory = tmp_path_factory.mktemp("machines")
    async with postgres.fresh() as dsn, Cluster(dsn, directory, SHRUNK, **SETTINGS) as made:
        (made.front,) = await made.start(1, ROLES)
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def scene(cluster: Cluster) -> AsyncIterator[Scene]:
    left = [one for one in cluster.replicas if one.alive and one is not cluster.front]
    first = left[0] if left else (await cluster.start(1, ROLES))[0]
    agent = await cluster.agent(cluster.client(cluster.front), say("fine"))
    project = await cluster.sql.fetchrow("select id, org_id from projects limit 1")
    machine = await make_machine(cluster.sql, project["org_id"], project["id"])
    binding = await bind(cluster.sql, machine, agent.uuid)
    yield Scene(cluster, [first, cluster.front], machine, agent.uuid, binding)
    await cluster.verify()


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

        await until(offline, "the machine is offline long before its lease is over", limit_s=20)
        daemon.url = scene.b.url
        answer = await daemon.register([process_claim(public)])
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
        assert loop.time() - started < 15
        daemon.url = scene.b.url
        await daemon.register()
        await daemon.connect()
        process_id = await scene.queue("true")
        public = await daemon.take(process_id)
        assert public == encode(IdKind.PROCESS, process_id)
        assert await scene.a.exited() == 0


# --- with the real daemon -----------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def road(scene: Scene) -> AsyncIterator[TcpProxy]:
    """The road from the daemon to a replica, which may be led to another one."""
    proxy = TcpProxy("127.0.0.1", scene.a.ports[0])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


@pytest.fixture
def daemon(scene: Scene, road: TcpProxy, tmp_path: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path / "machine", f"http://127.0.0.1:{road.port}", scene.machine.token)
    with running(made):
        yield made


COUNTED = "echo begun >> log; while [ ! -e stop ]; do sleep 0.05; done; echo over >> log; echo the end"


async def begun(scene: Scene, daemon: DaemonProcess) -> UUID:
    """Queue a command that counts its runs, and wait until it runs."""
    process_id = await scene.queue(COUNTED)

    async def runs() -> bool:
        return bool((await scene.process(process_id))["state"] == "running")

    await until(runs, f"the command runs\n{daemon.log.read_text()[-2000:]}", limit_s=20)
    return process_id


async def ended(scene: Scene, daemon: DaemonProcess, process_id: UUID) -> Any:
    """Let the command end, and wait until that is known."""
    (daemon.work / "stop").touch()

    async def over() -> bool:
        return (await scene.process(process_id))["closed_at"] is not None

    await until(over, f"its end is known\n{daemon.log.read_text()[-2000:]}", limit_s=40)
    assert (daemon.work / "log").read_text() == "begun\nover\n"
    row = await scene.process(process_id)
    assert (row["state"], row["exit_code"]) == ("exited", 0)
    return row


async def test_the_replica_with_the_socket_is_killed(scene: Scene, road: TcpProxy, daemon: DaemonProcess) -> None:
    process_id = await begun(scene, daemon)
    road.lead_to("127.0.0.1", scene.b.ports[0])
    scene.a.kill()
    await ended(scene, daemon, process_id)
    again = await scene.queue("true")

    async def over() -> bool:
        return bool((await scene.process(again))["state"] == "exited")

    await until(over, "the machine works on", limit_s=20)
    assert daemon.stop() == 0


@pytest.mark.slow
async def test_the_daemon_is_killed_while_its_command_runs(scene: Scene, daemon: DaemonProcess) -> None:
    process_id = await begun(scene, daemon)
    daemon.kill()
    daemon.start()

    async def online() -> bool:
        return await scene.connection() == "online"

    await until(online, "the daemon is back", limit_s=20)
    await ended(scene, daemon, process_id)


async def test_a_short_cut_of_the_line_is_not_seen(scene: Scene, road: TcpProxy, daemon: DaemonProcess) -> None:
    """Nothing ends, nothing is told, and the end that came while the line was cut arrives."""
    process_id = await begun(scene, daemon)
    road.go_silent()
    (daemon.work / "stop").touch()
    await until(lambda: (daemon.work / "log").read_text().endswith("over\n"), "the command is over")
    assert (await scene.process(process_id))["state"] == "running"
    road.flow()
    await ended(scene, daemon, process_id)
