"""Machines that are to sleep or to go because nothing happens on them, while something begins to happen on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from omnara.engine.machines import idle, offers, runtimes
from omnara.engine.machines.provisioning import Times
from omnara.errors import PendingWork
from tests.support.engine_case import Engine
from tests.support.machine_floor import Floor, Rows
from tests.support.machines import bind, make_pool_machine
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def locked(database: str, query: str, *values: Any) -> AsyncIterator[asyncpg.Connection]:
    """Hold the locks of a query for as long as the block runs, and commit."""
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            await connection.fetch(query, *values)
            yield connection
    finally:
        await connection.close()


async def until_somebody_waits(database: str) -> None:
    """Return once a statement waits for a lock."""
    connection = await asyncpg.connect(database)

    async def waits() -> bool:
        query = "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = $1)"
        return bool(await connection.fetchval(query, await connection.fetchval("select current_database()")))

    try:
        await until(waits, "a statement waits for a lock")
    finally:
        await connection.close()


async def pooled(engine: Engine) -> Floor:
    """A connected machine of a pool, on which nothing has happened for an hour."""
    project = engine.project
    machine = await make_pool_machine(Rows(engine), project.org_id, project.project_id, provider="docker", host="here")
    floor = Floor(engine, machine)
    await floor.register()
    await floor.sql.fetch(
        """update machines set sandbox_url = 'docker:x', provider_options = '{"sleep_after_ms": 30000}',
           delete_after_idle_minutes = 5, activated_at = now() - interval '1 hour',
           last_activity_at = now() - interval '1 hour'"""
    )
    return floor


async def granted_meanwhile(floor: Floor, database: str, sleep: Any) -> Any:
    """Let a machine fall asleep while a command is granted to it; what the falling asleep said."""
    async with locked(database, "select from machine_runtimes for share"):  # as a grant that is under way
        sleeping = asyncio.ensure_future(sleep)
        await until_somebody_waits(database)
        job = await floor.job()
        assert await floor.accept(job)
    try:
        return await sleeping
    finally:
        assert await floor.state(job) == ("starting", "")
        assert isinstance(await floor.pending(), offers.Pending), "its channel is still the one that counts"


async def test_a_daemon_does_not_fall_asleep_over_what_was_granted_meanwhile(engine: Engine, database: str) -> None:
    floor = await Floor.make(engine)
    await floor.sql.fetch("update machines set sandbox_url = 'https://sandbox'")
    with pytest.raises(PendingWork):
        await granted_meanwhile(floor, database, runtimes.sleep(floor.deps, floor.machine.id, floor.runtime_id))


async def test_a_container_is_not_put_to_sleep_over_what_was_granted_meanwhile(engine: Engine, database: str) -> None:
    floor = await pooled(engine)
    assert await idle.sleepy(floor.deps, ["docker"]) == [floor.machine.id]
    assert await granted_meanwhile(floor, database, idle.fall_asleep(floor.deps, floor.machine.id, ["docker"])) is None
    assert (await floor.sql.fetch("select asleep_since from machines"))[0]["asleep_since"] is None


async def test_an_idle_machine_stays_for_what_is_queued_while_it_is_looked_at(engine: Engine, database: str) -> None:
    floor = await pooled(engine)
    path = await engine.agent("go")
    floor.bindings[path.agent_id] = await bind(floor.sql, floor.machine, path.agent_id, kind="pool")
    async with locked(database, "select from agent_sched for no key update"):  # as whoever queues a command
        removing = asyncio.ensure_future(idle.remove_idle(floor.deps, Times()))
        await until_somebody_waits(database)
        job = await floor.queue(path, None)
    assert await removing == 0
    assert await floor.state(job) == ("queued", "")
    assert (await floor.sql.fetch("select lifecycle_state from machines"))[0]["lifecycle_state"] == "active"
    await floor.sql.fetch("update processes set state = 'failed', closed_at = now()")
    assert await idle.remove_idle(floor.deps, Times()) == 1
