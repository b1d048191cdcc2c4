"""Machines that are given to agents, and taken from them, while somebody else deletes them: in one order of locks.

Source: machines.md §8, §12; engine.md §4 (launch, config change), §8 (archive).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnara.access.roles import ProjectScope
from omnara.db import bindings as bindings_db
from omnara.db import machines as machines_db
from omnara.domain.config import PoolSource
from omnara.engine import lifecycle
from omnara.engine.configs import create_config
from omnara.engine.launch import launch_agent
from omnara.engine.machines import closing_down
from omnara.engine.machines.admission import Owner, add_pool_machine
from omnara.engine.machines.bindings import lock_for_release
from omnara.engine.machines.closing import DECOMMISSIONED
from omnara.engine.scope import AgentPath
from omnara.errors import InvalidRequest
from omnara.ids import IdKind, encode
from tests.integration.test_machine_engine_races import until_somebody_waits
from tests.integration.test_machine_sources import attached, change, launched, machine, pool, source
from tests.support.engine_case import Engine

LAPTOP = {"machine": "laptop"}


@pytest.mark.parametrize("way", ["launch", "change"])
@pytest.mark.parametrize("taken", ["deleted", "withdrawn"])
async def test_a_machine_that_is_being_taken_away_is_given_to_nobody(
    engine: Engine, database: str, way: str, taken: str
) -> None:
    machine_id = await machine(engine)
    agent = (await launched(engine)).agent.id
    text = source(machine_sources=[LAPTOP])
    made = await create_config(engine.deps, engine.p, engine.project, text, "json")
    async with engine.deps.db.transaction() as connection:
        assert await machines_db.lock(connection, engine.project.org_id, machine_id)
        if way == "launch":
            launch = launch_agent(engine.deps, engine.p, engine.project, made.config.row.id)
            giving: asyncio.Future[Any] = asyncio.ensure_future(launch)
        else:
            giving = asyncio.ensure_future(change(engine, agent, LAPTOP))
        await until_somebody_waits(database)
        await machines_db.drop_grants(connection, machine_id)
        if taken == "deleted":
            await machines_db.mark_deleted(connection, machine_id, DECOMMISSIONED)
    with pytest.raises(InvalidRequest, match=r"machine_sources\.0\.machine"):
        await giving
    assert await engine.fetch("select id from agent_machine_bindings") == []
    assert await engine.broken_invariants() == {}


async def test_a_machine_that_was_just_given_is_taken_away_again(
    engine: Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion waits for the launch, and sees what it made."""
    machine_id = await machine(engine)
    deletion: list[asyncio.Task[None]] = []
    real = bindings_db.insert_binding

    async def insert(*args: Any) -> bool:
        done = await real(*args)
        delete = closing_down.delete_machine(engine.deps, engine.p, engine.project.org_id, machine_id)
        deletion.append(asyncio.create_task(delete))
        await until_somebody_waits(database)
        return done

    monkeypatch.setattr(bindings_db, "insert_binding", insert)
    done = await launched(engine, LAPTOP)
    await deletion[0]
    assert await attached(engine, done.agent.id) == []
    assert await engine.broken_invariants() == {}


async def test_an_agent_that_gets_a_machine_while_it_is_archived_makes_no_deadlock(
    engine: Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new machine is locked by whoever ends it, who then wants the agent that the archiving has locked."""
    pool_id = await pool(engine)
    agent = (await launched(engine)).agent.id
    has_agent = asyncio.Event()
    tries: list[int] = []
    ending: list[asyncio.Task[None]] = []
    real_close = lifecycle._close

    async def end(machine_id: Any, holds: asyncio.Event) -> None:
        async with engine.deps.db.transaction() as connection:
            assert await machines_db.lock(connection, engine.project.org_id, machine_id)
            holds.set()
            await has_agent.wait()
            await closing_down.end_pool_machine(connection, machine_id, "idle")

    async def lock(*args: Any) -> None:
        await lock_for_release(*args)
        if not tries:
            holds = asyncio.Event()
            machine_id = await asyncio.create_task(added(engine, engine.project, agent, pool_id))
            ending.append(asyncio.create_task(end(machine_id, holds)))
            await holds.wait()
        tries.append(1)

    async def close(*args: Any) -> Any:
        if len(tries) == 1:
            has_agent.set()
            await until_somebody_waits(database)
        return await real_close(*args)

    monkeypatch.setattr(lifecycle, "lock_for_release", lock)
    monkeypatch.setattr(lifecycle, "_close", close)
    await lifecycle.archive(engine.deps, engine.p, AgentPath(agent))
    await ending[0]  # in a deadlock, it would be chosen: it waited first
    assert len(tries) == 2
    assert await attached(engine, agent) == []
    rows = await engine.fetch("select lifecycle_state, lifecycle_reason_code from machines")
    assert [tuple(row) for row in rows] == [("deleting", "idle")]
    assert await engine.broken_invariants() == {}


async def added(engine: Engine, project: ProjectScope, agent: Any, pool_id: Any) -> Any:
    """One more machine for an agent, as its tool makes one."""
    async with engine.deps.db.transaction() as connection:
        await bindings_db.lock_pools(connection, [pool_id])
        owner = Owner(project.org_id, project.project_id, agent)
        made = await add_pool_machine(connection, owner, PoolSource(pool_id=encode(IdKind.MACHINE_POOL, pool_id)))
        return made.machine_id
