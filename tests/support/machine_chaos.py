"""Agents with machines on real server processes: each command runs once and is told once, whatever dies."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from omnara.client import Client
from omnara.ids import IdKind, encode
from omnara.testing import Answer, Call, say
from omnara.testing.ports import free_ports
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.daemon_process import DaemonProcess, NetworkNamespace, running
from tests.support.machines import TestMachine, bind, make_machine
from tests.support.processes import ServerProcess
from tests.support.tcp_proxy import TcpProxy
from tests.support.times import Times
from tests.support.waiting import until

TOOLS = ("run_command", "read_process", "write_process", "stop_process", "list_processes")
HELD = "echo begun >> log; while [ ! -e stop ]; do sleep 0.05; done; echo over >> log; echo the end"
"""A command that counts its runs and ends when a test lets it."""


class MachineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of machines, in seconds, as far as tests wait for them. Source: machines.md §4 (timers)."""

    env: dict[str, str]
    short_cut_s: float
    """A cut that nobody may notice: longer than the lease, so that the machine is out of reach, and shorter than lease
    and grace together by what a daemon may take to come back."""
    unreachable_s: float
    """From a cut until the waiting call has its answer, at most."""
    long_cut_s: float
    back_s: float
    """From the end of a cut until the machine works again, at most."""


QUICK = MachineTimes(
    env={
        "MACHINE_HEARTBEAT": "500ms",
        "MACHINE_LEASE": "2s",
        "MACHINE_GRACE": "4s",
        "MACHINE_DRAIN": "300ms",
        "MACHINE_SWEEP": "200ms",
        "DEATH_GRACE": "0",
    },
    short_cut_s=2.5,
    unreachable_s=30,
    long_cut_s=9,
    back_s=60,
)
PATIENT = {"MACHINE_GRACE": "60s"}
"""Nobody gives up while processes start on a busy computer, so every command has to come to its end. For every test
that is not about giving up: the shrunk grace is less than a daemon takes to start while everything else does."""
REAL = MachineTimes(env={}, short_cut_s=20, unreachable_s=45, long_cut_s=180, back_s=120)


def machine_times(times: Times) -> MachineTimes:
    """The constants that go with a run's."""
    return QUICK if times.name == "shrunk" else REAL


class Floor:
    """A cluster whose agents use machines. `front` is the API process with the machines' channels."""

    def __init__(self, cluster: Cluster, times: MachineTimes, directory: Path) -> None:
        self.cluster = cluster
        self.times = times
        self.directory = directory

    @property
    def client(self) -> Client:
        """A client of the process in front."""
        return self.cluster.client(self.cluster.front)

    async def machine(self) -> TestMachine:
        """A machine of somebody's own, for which no daemon runs yet."""
        if not await self.cluster.sql.fetchval("select count(*) from projects"):
            await self.client.agents()
        project = await self.cluster.sql.fetchrow("select id, org_id from projects order by created_at limit 1")
        return await make_machine(self.cluster.sql, project["org_id"], project["id"])

    @contextlib.asynccontextmanager
    async def daemon(
        self, machine: TestMachine, name: str, url: str | None = None, **options: Any
    ) -> AsyncIterator[DaemonProcess]:
        """The daemon of a machine, online."""
        made = DaemonProcess(self.directory / name, url or self.cluster.front.url, machine.token, **options)
        with running(made):
            await self.online(machine, made)
            yield made

    async def connection(self, machine: TestMachine) -> str:
        """Whether a machine is online."""
        query = "select state from machine_connections where machine_id = $1"
        return str(await self.cluster.sql.fetchval(query, machine.id))

    async def online(self, machine: TestMachine, daemon: DaemonProcess) -> None:
        """Wait until a machine is online by this very process.

        For a moment after a daemon was killed its machine counts as online still; and one that starts on a cold
        computer takes longer than a call waits for its machine.
        """

        async def there() -> bool:
            return daemon.connected and await self.connection(machine) == "online"

        await until(there, f"the machine is online\n{daemon.tail()}", limit_s=self.times.back_s)

    async def offline(self, machine: TestMachine) -> None:
        """Wait until a machine counts as out of reach: nothing was heard from it for its lease."""

        async def gone() -> bool:
            return await self.connection(machine) == "offline"

        await until(gone, "the machine is offline", limit_s=self.times.unreachable_s)

    async def agent(self, machines: Sequence[TestMachine], *answers: Answer, text: str = "agent") -> Handle:
        """An agent with these machines that is about to hear the message on which it acts."""
        agent = await self.cluster.agent(self.client, say("ready"), *answers, tools=TOOLS, text=text)
        await agent.settled()
        for machine in machines:
            await bind(self.cluster.sql, machine, agent.uuid)
        return agent

    async def processes(self, agent: Handle) -> list[Any]:
        """The rows of an agent's commands, oldest first."""
        query = "select * from processes where agent_id = $1 order by created_at, id"
        return list(await self.cluster.sql.fetch(query, agent.uuid))

    async def until_states(self, agent: Handle, *states: str, limit_s: float = 60.0) -> None:
        """Wait until an agent's commands are in these states."""

        async def there() -> bool:
            return [row["state"] for row in await self.processes(agent)] == list(states)

        await until(there, f"the commands are {states}", limit_s=limit_s)


async def results(agent: Handle) -> list[tuple[str, Any]]:
    """Outcome and value of each tool result in an agent's log; a value may be text."""
    found = []
    for event in await agent.events():
        if event.kind == "tool_result":
            block = event.content_blocks[0]
            found.append((str(event.outcome), block.get("value", block.get("text"))))
    return found


def run(command: str, machine: TestMachine | None = None, **more: Any) -> Call:
    """A call of `run_command`."""
    where = {} if machine is None else {"machine_id": machine.public_id}
    return Call("run_command", {"command": command, **where, **more})


def public(process_id: UUID) -> str:
    """A command as its agent knows it."""
    return encode(IdKind.PROCESS, process_id)


# --- the line between a daemon and its server ---------------------------------------------------------------


class Cable:
    """Leads to a server until it is pulled; what was on its way may arrive when it is plugged in again."""

    url: str
    around: tuple[str, ...] = ()

    def pull(self) -> None:
        """Let nothing through."""
        raise NotImplementedError

    def plug(self) -> None:
        """Let everything through again."""
        raise NotImplementedError


class Relay(Cable):
    """A relay that can go silent: connections stay, and what is sent is held back."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy
        self.url = f"http://127.0.0.1:{proxy.port}"
        self.pull, self.plug = proxy.go_silent, proxy.flow  # type: ignore[method-assign]


class Wire(Cable):
    """A real network of the daemon's own, whose only link goes down: packets are lost."""

    def __init__(self, space: NetworkNamespace, port: int) -> None:
        self._space = space
        self.around = space.around
        self.url = f"http://host.docker.internal:{port}"
        self.pull, self.plug = space.pull, space.plug  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def relay(front: ServerProcess) -> AsyncIterator[Cable]:
    """A relay to a server."""
    proxy = TcpProxy("127.0.0.1", front.ports[0])
    await proxy.start()
    try:
        yield Relay(proxy)
    finally:
        await proxy.stop()


@contextlib.asynccontextmanager
async def wire(front: ServerProcess) -> AsyncIterator[Cable]:
    """A network namespace; the server must listen on all addresses. Skips without root or iproute2."""
    number = front.ports[0] % 250
    with NetworkNamespace(f"omn{front.ports[0]}", number) as space:
        yield Wire(space, front.ports[0])


async def everywhere(cluster: Cluster, roles: str) -> ServerProcess:
    """Start a process that listens on all addresses of this computer."""
    ports = free_ports()
    made = cluster.make(roles, ports=ports, settings={"LISTEN": f"0.0.0.0:{ports[0]}"})
    made.launch()
    await made.ready()
    return made
