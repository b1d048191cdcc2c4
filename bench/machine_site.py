"""A server whose agents have machines: pools, daemons as processes of their own, and a look into its database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Self
from uuid import UUID

import aiohttp
import asyncpg

from bench.cluster import Database
from bench.processes import Child, ChildFailed, Process
from bench.servers import Server, server_environment
from bench.usage import fine_cpu_s
from omnara.access.tokens import TokenKind, generate
from omnara.client import Client
from omnara.clock import poll_until
from omnara.ids import IdKind, decode
from omnara.vault import generate_ring

__all__ = ["MODELS", "Daemon", "Site"]

MODELS: Final = ("once", "endless")
"""Models that ask for `true`: once for each message, and in every answer."""
LIMIT_S: Final = 120.0
LAUNCHES_AT_ONCE: Final = 8


class Daemon:
    """A machine that somebody connected: `omnara daemon run`, and what the server calls it."""

    def __init__(self, machine_id: str, name: str, process: Process) -> None:
        self.machine_id = machine_id
        self.name = name
        self.process = process


class Site:
    """One replica with `docker` or without. Enter it to start it; at the end nothing that it started is left."""

    def __init__(self, database: Database, directory: Path, model: Child, *, docker: bool) -> None:
        self._directory = directory
        self._key = generate(TokenKind.PERSONAL).text
        environment = server_environment(database, generate_ring(), self._key, str(model.hello["url"]))
        environment |= {"OMNARA_DATA_DIR": str(directory / "data")}
        environment |= {} if docker else {"OMNARA_DOCKER_HOST": "off"}
        self.server = Server("machines", environment, directory)
        self._dsn = database.dsn
        self._daemons: list[Daemon] = []
        self._stack = contextlib.AsyncExitStack()
        self._scope = ""

    async def __aenter__(self) -> Self:
        """Start the server and make its models. Raises ChildFailed."""
        try:
            self._stack.push_async_callback(self._end_processes)
            await self.server.start()
            self.conn: Any = await asyncpg.connect(self._dsn)
            self._stack.push_async_callback(self.conn.close)
            self.client = await self._stack.enter_async_context(Client(self.server.url, self._key, timeout_s=60.0))
            headers = {"Authorization": f"Bearer {self._key}"}
            self._http = await self._stack.enter_async_context(aiohttp.ClientSession(self.server.url, headers=headers))
            for model in MODELS:
                made = await self.client.launch(model=f"openai/{model}", system_prompt="Run commands.")
                self._scope = made.links.inputs.partition("/agents/")[0]
                await self.client.delete(made.id)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.shield(self._stack.aclose())

    async def _end_processes(self) -> None:
        for daemon in self._daemons:
            await daemon.process.kill()
        await self.server.kill()

    # --- agents and machines --------------------------------------------------------------------------------

    async def pool(self, provider: str) -> dict[str, Any]:
        """Make a pool of the project's; return it as a source of machines."""
        org = self._scope.partition("/projects/")[0]
        body = {"name": provider, "provider": provider, "max_total_machines": 100}
        made = await self._post(f"{org}/machine-pools", body)
        await self._post(f"{self._scope}/machine-pool-grants", {"machine_pool_id": made["id"]})
        return {"pool": provider, "initial_num_machines": 1, "max_machines": 1}

    async def daemon(self, name: str) -> Daemon:
        """Connect a machine and start its daemon; see `until_online`."""
        made = await self.client.machines.connect(name)
        environment = {
            "OMNARA_API_URL": self.server.url,
            "OMNARA_MACHINE_TOKEN": made.token,
            "OMNARA_HOME": str(self._directory / name),
        }
        process = Process(
            [sys.executable, "-m", "omnara", "daemon", "run"], environment, self._directory / f"{name}.log"
        )
        daemon = Daemon(made.machine.id, name, process)
        self._daemons.append(daemon)
        await process.start()
        return daemon

    async def remove(self, daemons: Sequence[Daemon]) -> None:
        """Delete machines that were connected; their daemons end by themselves."""
        for daemon in daemons:
            await self.client.machines.delete(daemon.machine_id)
            await daemon.process.stop()

    async def agent(self, source: dict[str, Any], model: str = "once", message: str | None = None) -> str:
        """Launch an agent with machines of a source; return its id."""
        config = {
            "instruction": "Run commands.",
            "model": {"provider_config": "openai", "name": model},
            "machine_sources": [source],
        }
        made = await self._post(f"{self._scope}/agent-configs", {"source": json.dumps(config), "source_format": "json"})
        body = {"config": made["id"], **({} if message is None else {"message": message})}
        return str((await self._post(f"{self._scope}/agents", body))["agent"]["id"])

    async def agents(self, count: int, source: dict[str, Any], **more: Any) -> list[str]:
        """Launch so many."""
        turns = asyncio.Semaphore(LAUNCHES_AT_ONCE)

        async def one() -> str:
            async with turns:
                return await self.agent(source, **more)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
        return [task.result() for task in tasks]

    async def archive(self, agents: Sequence[str]) -> None:
        """End agents, and wait until the machines that pools made for them are gone. Raises ChildFailed."""
        for agent in agents:
            await self.client.delete(agent)
        await self._until(_GONE, "machines are deleted")

    async def until_online(self, count: int) -> None:
        """Wait until so many machines are active and online. Raises ChildFailed."""
        await self._until(_ONLINE, f"{count} machines are online", count)

    async def _until(self, query: str, what: str, *values: Any) -> None:
        async def holds() -> bool:
            return bool(await self.conn.fetchval(query, *values))

        if not await poll_until(holds, within_s=LIMIT_S, every_s=0.01):
            raise ChildFailed(f"{what}: not within {LIMIT_S:g} s\n{self.server.log_tail()}")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(path, json=body) as response:
            text = await response.text()
        if response.status not in (200, 201):
            raise ChildFailed(f"POST {path}: {response.status} {text}")
        return json.loads(text)

    # --- what it costs --------------------------------------------------------------------------------------

    async def quiet(self, seconds: float, pids: Sequence[int] = ()) -> tuple[float, float]:
        """Do nothing for so long; return the processor time of the server and of other processes, in seconds."""

        def used() -> tuple[float, float]:
            return fine_cpu_s(self.server.pid), sum(fine_cpu_s(pid) for pid in pids)

        before, begun = used(), time.monotonic()
        await asyncio.sleep(seconds)
        share = seconds / (time.monotonic() - begun)
        after = used()
        return (after[0] - before[0]) * share, (after[1] - before[1]) * share

    @contextlib.asynccontextmanager
    async def turns(self, agent: str) -> AsyncIterator[Any]:
        """Give a coroutine function that sends the agent a message and returns when its turn is over."""
        over = asyncio.Event()

        async def read(events: Any) -> None:
            async for item in events:
                if getattr(item, "kind", "") == "model_output" and not item.tool_calls:
                    over.set()

        async def turn() -> None:
            over.clear()
            await self.client.send(agent, "Again.")
            async with asyncio.timeout(LIMIT_S):
                await over.wait()

        async with self.client.stream(agent) as events, asyncio.TaskGroup() as group:
            reading = group.create_task(read(events))
            yield turn
            reading.cancel()


def agent_id(agent: str) -> UUID:
    """The database's id of an agent."""
    return decode(IdKind.AGENT, agent)


_ONLINE: Final = """
select count(*) = $1 from machines m join machine_connections c on c.machine_id = m.id
where m.lifecycle_state = 'active' and c.state = 'online'
"""
_GONE: Final = "select not exists (select from machines where source_kind = 'pool' and lifecycle_state <> 'deleted')"
