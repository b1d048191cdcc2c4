"""Agents whose containers are on a real engine, on real server processes; and a look into them from outside."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from omnara.client import Client
from omnara.machines.providers.docker import DockerProvider
from omnara.testing import Answer
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.docker_fleet import remove_everything
from tests.support.machine_chaos import TOOLS
from tests.support.postgres import PostgresForTests
from tests.support.processes import ServerProcess
from tests.support.times import Times
from tests.support.waiting import until

ROLES = "api,worker,maintenance"


def held(log: str = "log") -> str:
    """A command that counts its runs and ends when a test lets it."""
    return f"echo begun >> {log}; while [ ! -e stop ]; do sleep 0.05; done; echo over >> {log}; echo the end"


class Boxes:
    """Agents of the flat API on a cluster: each has a container from its first command on."""

    def __init__(self, cluster: Cluster, provider: DockerProvider, endpoint: str) -> None:
        self.cluster = cluster
        self.provider = provider
        self.endpoint = endpoint

    @property
    def client(self) -> Client:
        """A client of the process in front."""
        return self.cluster.client(self.cluster.front)

    async def server(self) -> ServerProcess:
        """Start a process that does everything; it is in front."""
        (made,) = await self.cluster.start(1, ROLES)
        self.go_to(made)
        return made

    def go_to(self, front: ServerProcess) -> None:
        """Ask this process from now on."""
        self.cluster.front = front
        client = self.client
        for agent in self.cluster.agents:
            agent.client = client

    async def agent(self, *answers: Answer) -> Handle:
        """An agent that begins at once."""
        return await self.cluster.agent(self.client, *answers, tools=TOOLS)

    async def container(self, agent: Handle, *, other_than: str = "") -> str:
        """The container of an agent, once it runs."""
        query = "select container_id from sandboxes where agent_id = $1 and state = 'running' and container_id <> $2"
        found: list[str | None] = []

        async def there() -> bool:
            found[:] = [await self.cluster.sql.fetchval(query, agent.uuid, other_than)]
            return found != [None]

        await until(there, "the agent has a container", limit_s=60)
        return str(found[0])

    async def inside(self, container: str, command: str) -> str:
        """Run something in a container, past everything of ours."""
        words = ["docker", "-H", self.endpoint, "exec", "-w", "/home/agent", container, "sh", "-c", command]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
        return done.stdout

    async def has_lines(self, container: str, name: str, lines: list[str]) -> None:
        """Wait until a file in a container has these lines."""

        async def there() -> bool:
            return (await self.inside(container, f"cat {name}")).split() == lines

        await until(there, f"{name} has {lines}", limit_s=60)

    async def owned(self) -> list[Any]:
        """All that this installation has on the engine."""
        query = "select value from installation where name = 'installation_id'"
        return await self.provider.owned(str(await self.cluster.sql.fetchval(query)))


async def said(agent: Handle, text: str) -> bool:
    """Whether this is the last thing that an agent's model said."""
    return (await agent.texts())[-1:] == [text]


@contextlib.asynccontextmanager
async def boxes_on(
    postgres: PostgresForTests, directory: Path, times: Times, provider: DockerProvider, endpoint: str, **settings: str
) -> AsyncIterator[Boxes]:
    """A server on a database of its own; every invariant is checked, and what it leaves on the engine removed."""
    async with (
        postgres.fresh() as dsn,
        Cluster(dsn, directory, times, **settings, OMNARA_DOCKER_HOST=endpoint) as cluster,
    ):
        try:
            made = Boxes(cluster, provider, endpoint)
            await made.server()
            yield made
            await cluster.verify()
        finally:
            query = "select value from installation where name = 'installation_id'"
            installation = str(await cluster.sql.fetchval(query))
            await cluster.discard()
            await remove_everything(provider, installation)
