"""Locks stand for processes, never for agents: their number does not grow with the work. Source: field-reports B09."""

from __future__ import annotations

import asyncio

from omnara.providers.in_process import say
from omnara.providers.protocol import ModelCall, Outcome
from tests.support.engine import engine_on
from tests.support.waiting import until


async def test_three_hundred_running_agents_hold_no_lock_of_their_own(database: str) -> None:
    """Two processes with all of them in a model call: one lock on each of their direct connections, nothing else."""
    go, calls = asyncio.Event(), 0

    async def wait(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        await go.wait()
        return say("hello")

    async with engine_on(database, wait) as engine:
        agents = await engine.add_agents(300)
        await engine.start(2)
        for agent in agents:
            await engine.say(agent, wake=False)
        await until(lambda: calls == len(agents), "all are in a model call", limit_s=30)
        query = """select count(*), count(distinct (classid, objid)) from pg_locks
                   join pg_stat_activity using (pid)
                   where locktype = 'advisory' and mode = 'ShareLock' and datname = current_database()"""
        held, keys = await engine.sql.fetchrow(query)
        assert (2 <= held <= 4, keys) == (True, 2)
        go.set()
        await engine.until_idle(*agents, limit_s=30)
