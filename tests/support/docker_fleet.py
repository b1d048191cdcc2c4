"""A server with makers and drivers of containers, their times shrunk, and agents with machines of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec

from omnara.app.hints import HintService
from omnara.engine.machines.provisioning import Times
from omnara.fleet.driver import Driver
from omnara.fleet.provisioner import Provisioner
from omnara.fleet.reached import Reached
from omnara.fleet.sessions import Sessions
from omnara.ids import IdKind, decode, new_uuid
from omnara.machines.providers.docker import DockerProvider
from omnara.worker import Identity
from tests.contract.server import ApiServer, api_server
from tests.support.machines import Rows, TestMachine, bind, queue_command
from tests.support.waiting import until

QUICK = {"machine_heartbeat_s": 1.0, "machine_lease_s": 60.0, "machine_drain_s": 0.2, "machine_sweep_s": 0.1}
TIMES = Times(
    retries_s=(0.1, 0.1, 0.1),
    removals_s=(0.2, 0.2, 0.2, 0.2),
    unavailable_s=0.2,
    look_s=0.1,
    wake_pause_s=0.05,
    observe_s=0.3,
    upkeep_s=0.3,
    minute_s=0.02,
)


async def insert_machine(sql: Rows, org_id: UUID, project_id: UUID, image: str, **columns: Any) -> TestMachine:
    """Insert a pool of its own and a machine of it that is to be made, without telling anybody."""
    pool_id, grant_id, machine_id = new_uuid(), new_uuid(), new_uuid()
    config = msgspec.json.encode({"image": image}).decode()
    await sql.fetch(
        "insert into machine_pools (id, org_id, name, provider, provider_config, max_total_machines)"
        " values ($1, $2, $3, 'docker', $4, 10)",
        pool_id, org_id, str(pool_id), config,
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_pool_grants (id, org_id, project_id, pool_id) values ($1, $2, $3, $4)",
        grant_id, org_id, project_id, pool_id,
    )  # fmt: skip
    await sql.fetch(
        "insert into machines (id, org_id, source_kind, pool_id, pool_grant_id, project_id, display_name, provider,"
        " memory_mb, lifecycle_state, next_reconcile_after, provider_options, delete_after_idle_minutes)"
        " values ($1, $2, 'pool', $3, $4, $5, 'box', 'docker', 256, 'provisioning', now(), $6, $7)",
        machine_id, org_id, pool_id, grant_id, project_id,
        columns.get("provider_options", "{}"), columns.get("delete_after_idle_minutes"),
    )  # fmt: skip
    await sql.fetch(
        "insert into machine_grants (id, org_id, project_id, machine_id, pool_grant_id, source_kind)"
        " values ($1, $2, $3, $4, $5, 'pool')",
        new_uuid(), org_id, project_id, machine_id, grant_id,
    )  # fmt: skip
    return TestMachine(machine_id, org_id, project_id, "")


class Site:
    """A provider that a test has made already; it can be out of reach."""

    def __init__(self, provider: DockerProvider) -> None:
        self.provider = provider
        self.name = provider.name

    async def open(self) -> tuple[DockerProvider, str]:
        return self.provider, await self.provider.host()

    async def close(self) -> None:
        """The test closes it."""


class Fleet:
    """One replica."""

    def __init__(self, server: ApiServer, provider: DockerProvider, times: Times) -> None:
        self.server = server
        parts = server.parts.services
        bus = next(part for part in parts if isinstance(part, HintService)).bus
        sessions = next(part for part in parts if isinstance(part, Sessions))
        identity: Identity = next(part for part in parts if part.name == "identity")._identity  # type: ignore[attr-defined]

        def worker_id() -> UUID:
            return identity.worker_id

        self.worker_id = worker_id
        self.reached = Reached(server.deps, [Site(provider)], worker_id, times)
        self.provisioner = Provisioner(server.deps, bus, self.reached, worker_id, times)
        self.driver = Driver(server.deps, bus, sessions, self.reached, worker_id)
        identity.listen(self.driver)

    async def start(self) -> None:
        """Take the place of the server's own makers and drivers, which know of no place."""
        for part in self.server.parts.services:
            if part.name in (self.driver.name, self.provisioner.name):
                await part.stop()
        await self.provisioner.start()
        await self.driver.start()

    async def stop(self) -> None:
        """End both."""
        await self.driver.stop()
        await self.provisioner.stop()

    async def fetch(self, query: str, *values: Any) -> list[Any]:
        """Run SQL."""
        return await self.server.rows(query, *values)

    # --- machines -----------------------------------------------------------------------------------------

    async def machine(self, image: str, **columns: Any) -> Held:
        """An agent with a machine that is to be made."""
        org_id, project_id = decode(IdKind.ORG, self.server.org), decode(IdKind.PROJECT, self.server.project)
        agent_id = decode(IdKind.AGENT, (await self.server.agent()).rsplit("/", 1)[1])
        machine = await insert_machine(self, org_id, project_id, image, **columns)
        binding = await bind(self, machine, agent_id, kind="pool")
        self.server.deps.hints.machines((machine.id,))
        return Held(self, machine, agent_id, binding)


class Held:
    """An agent's machine."""

    def __init__(self, fleet: Fleet, machine: TestMachine, agent_id: UUID, binding: UUID) -> None:
        self.fleet = fleet
        self.machine = machine
        self.agent_id = agent_id
        self.binding = binding

    async def row(self) -> Any:
        """The machine's row."""
        return (await self.fleet.fetch("select * from machines where id = $1", self.machine.id))[0]

    async def until_state(self, state: str, limit_s: float = 20.0, **columns: Any) -> Any:
        """Wait until the machine is in a state of its life."""
        found: Any = None

        async def there() -> bool:
            nonlocal found
            found = await self.row()
            return found["lifecycle_state"] == state and all(found[name] == value for name, value in columns.items())

        await until(there, f"the machine is {state} {columns}", limit_s=limit_s)
        return found

    async def queue(self, command: str, wait_ms: int = 100) -> UUID:
        """Queue a command and say so."""
        process_id = await queue_command(
            self.fleet, self.machine, self.agent_id, self.binding, command, wait_ms=wait_ms
        )
        self.fleet.server.deps.hints.machines((self.machine.id,))
        return process_id

    async def process(self, process_id: UUID) -> Any:
        """A command's row."""
        return (await self.fleet.fetch("select * from processes where id = $1", process_id))[0]

    async def until_process(self, process_id: UUID, state: str, limit_s: float = 20.0) -> Any:
        """Wait until a command is in a state."""

        async def there() -> bool:
            return bool((await self.process(process_id))["state"] == state)

        await until(there, f"the command is {state}", limit_s=limit_s)
        return await self.process(process_id)

    async def run(self, command: str, limit_s: float = 20.0) -> Any:
        """Run a command to its success."""
        return await self.until_process(await self.queue(command), "exited", limit_s)


@contextlib.asynccontextmanager
async def fleet(database: str, provider: DockerProvider, times: Times = TIMES) -> AsyncIterator[Fleet]:
    """A server that makes and drives containers; all of them are removed at the end."""
    async with api_server(database, **QUICK) as server:
        made = Fleet(server, provider, times)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


async def remove_everything(provider: DockerProvider, installation: str) -> None:
    """Remove all that an installation has on the engine."""
    for thing in await provider.owned(installation):
        await provider.discard(thing)
