"""Pool machines that the server drives itself: claimed, driven over a real home, given back, taken over, mended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from omnara.clock import Deadline
from omnara.db.fleet import MachineClaim
from omnara.fleet.driver import Driver
from omnara.fleet.sessions import Sessions
from omnara.ids import IdKind, decode, new_uuid
from omnara.machines.posix import PosixHome
from omnara.machines.processes import HomeLost
from omnara.worker import Identity
from tests.contract.server import ApiServer, api_server, invariants_hold
from tests.support.machines import TestMachine, bind, make_machine, make_pool_machine, queue_command
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until

QUICK = {"machine_heartbeat_s": 1.0, "machine_lease_s": 60.0, "machine_drain_s": 0.2, "machine_sweep_s": 0.1}


class Folders:
    """A place whose machines are folders; it can be out of reach, and its machines can be lost."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lost = False
        self.gone: set[UUID] = set()
        self.mended: list[MachineClaim] = []
        self.opened = 0
        self.sql: Any = None

    def driven(self) -> list[tuple[str, str]]:
        return [("local", "here")]

    async def open_home(self, claim: MachineClaim) -> PosixHome:
        self.opened += 1
        if self.lost or claim.machine_id in self.gone:
            raise HomeLost("the folder cannot be reached")
        folder = self.root / f"{claim.machine_id}-{claim.generation}"
        folder.mkdir(exist_ok=True)
        return PosixHome(folder / "state", base_env={"PATH": "/usr/bin:/bin"}, default_cwd=str(folder))

    async def mend(self, claim: MachineClaim) -> bool:
        if claim.machine_id not in self.gone:
            return False
        self.gone.discard(claim.machine_id)
        self.mended.append(claim)
        query = "update machines set generation = generation + 1, worker_id = null, claim_token = null where id = $1"
        await self.sql(query, claim.machine_id)
        return True


class Replica:
    """A server in this test whose driver is given a place."""

    def __init__(self, server: ApiServer, folders: Folders) -> None:
        self.server = server
        parts = server.parts.services
        self.sessions = next(part for part in parts if isinstance(part, Sessions))
        self.identity: Identity = next(part for part in parts if part.name == "identity")._identity  # type: ignore[attr-defined]
        self.driver = next(part for part in parts if isinstance(part, Driver))
        self.driver._places = folders

    @property
    def worker_id(self) -> UUID:
        return self.identity.worker_id


@contextlib.asynccontextmanager
async def replica(database: str, folders: Folders) -> AsyncIterator[Replica]:
    async with api_server(database, **QUICK) as server:
        folders.sql = server.rows
        yield Replica(server, folders)


class Scene:
    """A replica, and an agent with its machine."""

    def __init__(self, first: Replica, folders: Folders, machine: TestMachine, agent_id: UUID, binding: UUID) -> None:
        self.first = first
        self.folders = folders
        self.machine = machine
        self.agent_id = agent_id
        self.binding = binding

    async def rows(self, query: str, *values: Any) -> list[Any]:
        return await self.first.server.rows(query, *values)

    async def queue(self, command: str) -> UUID:
        sql: Any = self.first.server
        process_id = await queue_command(_Sql(sql), self.machine, self.agent_id, self.binding, command, wait_ms=100)
        self.first.server.deps.hints.machines((self.machine.id,))
        return process_id

    async def ended(self, process_id: UUID, limit_s: float = 15.0) -> Any:
        found: Any = None

        async def over() -> bool:
            nonlocal found
            found = (await self.rows("select * from processes where id = $1", process_id))[0]
            return found["closed_at"] is not None

        await until(over, "the process is over", limit_s=limit_s)
        return found

    async def driven_by(self, replica: Replica, limit_s: float = 20.0) -> None:
        async def there() -> bool:
            row = await self.rows(
                "select m.worker_id, c.state from machines m join machine_connections c on c.machine_id = m.id"
                " where m.id = $1",
                self.machine.id,
            )
            return bool(row[0]["worker_id"] == replica.worker_id and row[0]["state"] == "online")

        await until(there, "the machine is driven and online", limit_s=limit_s)

    def folder(self, generation: int = 1) -> Path:
        return self.folders.root / f"{self.machine.id}-{generation}"


class _Sql:
    def __init__(self, server: ApiServer) -> None:
        self.fetch = server.rows


async def make_scene(first: Replica, folders: Folders) -> Scene:
    server = first.server
    org_id, project_id = decode(IdKind.ORG, server.org), decode(IdKind.PROJECT, server.project)
    agent_id = decode(IdKind.AGENT, (await server.agent()).rsplit("/", 1)[1])
    machine = await make_pool_machine(_Sql(server), org_id, project_id, provider="local", host="here")
    binding = await bind(_Sql(server), machine, agent_id, kind="pool")
    server.deps.hints.machines((machine.id,))
    return Scene(first, folders, machine, agent_id, binding)


@pytest_asyncio.fixture(loop_scope="session")
async def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest_asyncio.fixture(loop_scope="session")
async def scene(database: str, folders: Folders) -> AsyncIterator[Scene]:
    async with replica(database, folders) as first:
        made = await make_scene(first, folders)
        yield made
        await invariants_hold(first.server)


async def test_a_command_runs_on_a_driven_machine(scene: Scene) -> None:
    await scene.driven_by(scene.first)
    row = await scene.ended(await scene.queue("echo hello > there; exit 3"))
    assert (row["state"], row["exit_code"], row["reason_code"]) == ("failed", 3, "nonzero_exit")
    assert (scene.folder() / "there").read_text() == "hello\n"


async def test_a_stopping_replica_hands_over_and_the_command_runs_on(scene: Scene, database: str) -> None:
    await scene.driven_by(scene.first)
    process_id = await scene.queue("echo begun >> log; while [ ! -e stop ]; do sleep 0.05; done; echo over >> log")
    log = scene.folder() / "log"
    await until(log.exists, "the command has begun")
    async with replica(database, scene.folders) as second:
        started = asyncio.get_running_loop().time()
        await scene.first.driver.drain(Deadline(20))
        await scene.driven_by(second)
        assert asyncio.get_running_loop().time() - started < 15
        (scene.folder() / "stop").touch()
        row = await scene.ended(process_id)
        assert (row["state"], row["exit_code"]) == ("exited", 0)
        assert log.read_text() == "begun\nover\n"


async def test_the_machines_of_a_dead_worker_are_taken_over(scene: Scene) -> None:
    await scene.driven_by(scene.first)
    dead = new_uuid()
    await scene.rows(
        "insert into workers (id, lock_key, roles, version, lease_expires_at, state, ended_at)"
        " values ($1, 4711, '{worker}', 'test', now(), 'dead', now())",
        dead,
    )
    await scene.rows("update machines set worker_id = $2, claim_token = 1 where id = $1", scene.machine.id, dead)
    await until(lambda: scene.folders.opened == 2, "it is taken up anew")
    await scene.driven_by(scene.first)
    await scene.ended(await scene.queue("true"))


async def test_a_death_that_nobody_here_was_told_of_takes_its_channels_along(scene: Scene) -> None:
    """Who declared it died before it could note that the machine is offline: its lease would hide that for minutes."""
    await scene.driven_by(scene.first)
    sql: Any = scene.first.server
    other = await make_machine(_Sql(sql), scene.machine.org_id, scene.machine.project_id, "other")
    dead, runtime = new_uuid(), new_uuid()
    await scene.rows(
        "insert into workers (id, lock_key, roles, version, lease_expires_at, state, ended_at)"
        " values ($1, 4712, '{worker}', 'test', now(), 'dead', now())",
        dead,
    )
    await scene.rows(
        "insert into machine_runtimes (id, org_id, machine_id, daemon_instance_id, daemon_version, session_id,"
        " worker_id, connected_at, lease_expires_at)"
        " values ($1, $2, $3, $4, '1.0.0', $4, $5, now(), now() + interval '1 hour')",
        runtime, scene.machine.org_id, other.id, new_uuid(), dead,
    )  # fmt: skip
    await scene.rows("update machines set current_runtime_id = $2 where id = $1", other.id, runtime)

    async def offline() -> bool:
        query = "select state, reason from machine_connections where machine_id = $1"
        return tuple((await scene.rows(query, other.id))[0]) == ("offline", "disconnected")

    await until(offline, "it is offline")
    await scene.driven_by(scene.first)


async def test_a_lost_claim_stops_the_driving_at_once(scene: Scene, database: str) -> None:
    await scene.driven_by(scene.first)
    async with api_server(database, **QUICK) as second:
        other: Any = next(part for part in second.parts.services if part.name == "identity")
        idle = next(part for part in second.parts.services if isinstance(part, Driver))
        await idle.drain(Deadline(1))  # it would give back what it does not drive
        query = "update machines set worker_id = $2, claim_token = 1 where id = $1"
        await scene.rows(query, scene.machine.id, other._identity.worker_id)
        await until(lambda: len(scene.first.driver) == 0, "nothing is driven")
        process_id = await scene.queue("touch never")
        await asyncio.sleep(0.3)
        assert not (scene.folder() / "never").exists()
        assert (await scene.rows("select state from processes where id = $1", process_id))[0][0] == "queued"
        state = await scene.rows("select state from machine_connections where machine_id = $1", scene.machine.id)
        assert state[0][0] == "offline"
    await scene.ended(process_id)


async def test_a_place_out_of_reach_is_tried_again(scene: Scene) -> None:
    await scene.driven_by(scene.first)
    scene.folders.lost = True
    # The worker's identity is declared dead, which ends all driving; the next claim finds the place out of reach.
    scene.first.driver.declared_dead(new_uuid())
    await scene.rows("update machines set worker_id = null, claim_token = null where id = $1", scene.machine.id)
    await until(lambda: scene.folders.opened >= 3, "it is tried again")
    state = await scene.rows("select state from machine_connections where machine_id = $1", scene.machine.id)
    assert state[0][0] == "offline"
    scene.folders.lost = False
    await scene.driven_by(scene.first)


async def test_a_lost_container_is_replaced_and_the_new_one_is_driven(scene: Scene) -> None:
    await scene.driven_by(scene.first)
    process_id = await scene.queue("while [ ! -e stop ]; do sleep 0.05; done")
    await until(lambda: _running(scene, process_id), "it runs")
    scene.folders.gone.add(scene.machine.id)
    scene.first.driver.declared_dead(new_uuid())
    await scene.rows("update machines set worker_id = null, claim_token = null where id = $1", scene.machine.id)
    await until(lambda: bool(scene.folders.mended), "it was mended")
    row = await scene.ended(process_id)
    assert (row["state"], row["reason_code"]) == ("unknown", "local_process_missing_after_daemon_reconnect")
    await scene.driven_by(scene.first)
    row = await scene.ended(await scene.queue("pwd > where"))
    assert (scene.folder(2) / "where").read_text().strip() == str(scene.folder(2))
    (scene.folder() / "stop").touch()  # what stands for the lost container's process


async def _running(scene: Scene, process_id: UUID) -> bool:
    return bool((await scene.rows("select state from processes where id = $1", process_id))[0][0] == "running")


async def test_idle_machines_cost_nothing_each(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that happens in a second is the looks for all machines together: no statement is about one of them."""
    await scene.driven_by(scene.first)
    server = scene.first.server
    org_id, project_id = scene.machine.org_id, scene.machine.project_id
    for number in range(40):
        await make_pool_machine(_Sql(server), org_id, project_id, provider="local", host="here", name=f"m{number}")
    server.deps.hints.machines((scene.machine.id,))
    await until(lambda: len(scene.first.sessions) == 41, "all are driven", limit_s=20)
    await asyncio.sleep(0.5)
    borrowed = 0
    acquire = server.deps.db.acquire

    def counted() -> Any:
        nonlocal borrowed
        borrowed += 1
        return acquire()

    monkeypatch.setattr(server.deps.db, "acquire", counted)
    await asyncio.sleep(1.0)
    assert borrowed < 30, borrowed


async def test_an_outage_of_the_database_ends_no_driving(database: str, folders: Folders) -> None:
    """What ended while Postgres was away is told when it is back, over the same home."""
    async with proxied(database) as (proxy, url), replica(url, folders) as first:
        scene = await make_scene(first, folders)
        await scene.driven_by(first)
        process_id = await scene.queue("while [ ! -e stop ]; do sleep 0.05; done; echo over > there")
        await until(lambda: _running(scene, process_id), "it runs")
        proxy.go_silent()
        proxy.cut()
        (scene.folder() / "stop").touch()
        await until((scene.folder() / "there").exists, "the command is over")
        proxy.flow()
        row = await scene.ended(process_id, limit_s=30)
        assert (row["state"], row["exit_code"]) == ("exited", 0)
        await scene.driven_by(first)
        assert folders.opened == 1
