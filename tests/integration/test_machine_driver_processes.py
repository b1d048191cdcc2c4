"""Machines that real server processes drive: the driving one is killed or stopped, and each command runs once.

The machines are directories of this computer, which both replicas reach.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import pytest_asyncio

from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.machines import TestMachine, bind, make_pool_machine, queue_command
from tests.support.processes import ServerProcess
from tests.support.times import SHRUNK
from tests.support.waiting import until

ROLES = "api,worker,maintenance"
SETTINGS = {
    "OMNARA_LOCAL_MACHINES": "unsafe",
    "OMNARA_MACHINE_DRAIN": "500ms",
    "OMNARA_MACHINE_SWEEP": "200ms",
    "OMNARA_DEATH_GRACE": "0",
}
COUNTED = "echo begun >> log; while [ ! -e stop ]; do sleep 0.05; done; echo over >> log"


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that users of machines may enter; what runs below it is ended."""
    path = Path(tempfile.mkdtemp(prefix="omnara-driver-"))
    path.chmod(0o711)
    yield path
    for process in psutil.process_iter(["cwd", "cmdline"]):
        places = [process.info["cwd"] or "", *(process.info["cmdline"] or [])]
        if any(place.startswith(str(path)) for place in places):
            process.kill()
            process.wait(30)
    shutil.rmtree(path)


class Scene:
    """Two replicas, and a machine that one of them drives."""

    def __init__(self, cluster: Cluster, machine: TestMachine, agent_id: UUID, binding: UUID, directory: Path) -> None:
        self.cluster = cluster
        self.machine = machine
        self.agent_id = agent_id
        self.binding = binding
        self.directory = directory

    async def queue(self, command: str) -> UUID:
        return await queue_command(self.cluster.sql, self.machine, self.agent_id, self.binding, command, wait_ms=200)

    async def process(self, process_id: UUID) -> Any:
        return await self.cluster.sql.fetchrow("select * from processes where id = $1", process_id)

    async def until_state(self, process_id: UUID, state: str, *, limit_s: float = 30) -> float:
        async def there() -> bool:
            return bool((await self.process(process_id))["state"] == state)

        return await until(there, f"the command is {state}\n{await self.cluster.describe()}", limit_s=limit_s)

    async def driver(self, *, limit_s: float = 30) -> ServerProcess:
        """The process that drives the machine, once it is online."""
        found: list[ServerProcess] = []

        async def there() -> bool:
            row = await self.cluster.sql.fetchrow(
                "select m.worker_id, c.state from machines m join machine_connections c on c.machine_id = m.id"
                " where m.id = $1",
                self.machine.id,
            )
            replicas = [one for one in self.cluster.replicas if one.alive]
            found[:] = [one for one in replicas if row["worker_id"] is not None and one.is_worker(row["worker_id"])]
            return bool(found) and row["state"] == "online"

        await until(there, f"somebody drives the machine\n{await self.cluster.describe()}", limit_s=limit_s)
        return found[0]

    def file(self, name: str) -> Path:
        """A file where the commands run."""
        (workspace,) = self.directory.glob("data/local-machines/machines/*/workspace")
        return workspace / name


@pytest_asyncio.fixture(loop_scope="session")
async def scene(database: str, open_directory: Path) -> AsyncIterator[Scene]:
    data = open_directory / "data"
    data.mkdir(mode=0o711)
    async with Cluster(database, data, SHRUNK, **SETTINGS) as cluster:
        await cluster.start(2, ROLES)
        agent = await cluster.agent(cluster.client(cluster.replicas[0]), say("fine"))
        project = await cluster.sql.fetchrow("select id, org_id from projects limit 1")
        machine = await make_pool_machine(
            cluster.sql, project["org_id"], project["id"], provider="local", provisioned=False
        )
        binding = await bind(cluster.sql, machine, agent.uuid, kind="pool")
        yield Scene(cluster, machine, agent.uuid, binding, open_directory)
        await cluster.verify()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_the_replica_that_drives_a_machine_ends(scene: Scene, how: int) -> None:
    driver = await scene.driver()
    process_id = await scene.queue(COUNTED)
    await scene.until_state(process_id, "running")
    os.kill(driver.pid, how)
    # It is over and another one is queued before anybody drives the machine again.
    await driver.exited()
    scene.file("stop").touch()
    after = await scene.queue("echo after >> log")
    other = await scene.driver(limit_s=20)
    assert other is not driver
    await scene.until_state(process_id, "exited")
    await scene.until_state(after, "exited")
    lines = scene.file("log").read_text().splitlines()
    assert sorted(lines) == ["after", "begun", "over"]
    started = await scene.cluster.sql.fetchval("select count(*) from processes where state <> 'exited'")
    assert started == 0
