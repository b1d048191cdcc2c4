"""More work than slots: projects take turns, so that one with thousands of ready agents starves nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

from omnara.db.sched import NO_PROJECT, claim_in_turn
from omnara.ids import new_uuid
from omnara.providers.in_process import say
from omnara.providers.protocol import ModelCall, Outcome
from tests.support.by_hand import hand_worker
from tests.support.engine import Engine, engine_on
from tests.support.waiting import until


async def add_project(engine: Engine) -> UUID:
    """Another project that may use the model; agents added from now on belong to it."""
    project_id = new_uuid()
    await engine.sql.execute(
        "insert into projects (id, org_id, name) values ($1, $2, $3)", project_id, engine.org_id, str(project_id)
    )
    await engine.sql.execute(
        "insert into project_model_grants (id, project_id, configured_model_id) values ($1, $2, $3)",
        new_uuid(), project_id, engine.model_id,
    )
    engine.project_id = project_id
    return project_id


async def set_free(engine: Engine) -> None:
    """Nothing is claimed or ready any more."""
    await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null, ready_at = null")


async def test_claims_go_round_the_projects(database: str) -> None:
    """Equal shares, in order of project, whoever waits longest; a project without ready agents is passed over."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        sql: Any = engine.sql
        worker_id = await hand_worker(engine)
        noisy, parked = await add_project(engine), NO_PROJECT
        await engine.add_agents(40)
        await sql.execute("update agent_sched set ready_at = now() - interval '1 hour'")
        quiet = []
        for number in range(7):
            project_id = await add_project(engine)
            await engine.add_agents(2)
            quiet.append(project_id)
            if number == 3:
                parked = quiet.pop()
        await sql.execute("update agent_sched set ready_at = now() where project_id = any($1)", quiet)
        await sql.execute("update agent_sched set ready_at = now() + interval '1 hour' where project_id = $1", parked)

        one_each = await claim_in_turn(sql, worker_id, limit=7, after=NO_PROJECT, token=1)
        assert Counter(claim.project_id for claim in one_each) == Counter([noisy, *quiet])
        after = max(claim.project_id for claim in one_each)
        assert await claim_in_turn(sql, worker_id, limit=7, after=after, token=2) == []
        [first] = await claim_in_turn(sql, worker_id, limit=1, after=NO_PROJECT, token=3)
        [second] = await claim_in_turn(sql, worker_id, limit=1, after=first.project_id, token=4)
        assert first.project_id < second.project_id
        rest = await claim_in_turn(sql, worker_id, limit=64, after=NO_PROJECT, token=5)
        shares = Counter(claim.project_id for claim in rest)
        assert shares[noisy] == 64 // len(shares)
        assert parked not in shares
        await set_free(engine)


async def test_a_worker_that_is_not_live_claims_nothing_in_turn(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        sql: Any = engine.sql
        worker_id = await hand_worker(engine)
        await engine.add_agents(3)
        await sql.execute("update agent_sched set ready_at = now()")
        await sql.execute("update workers set state = 'dead'")
        assert await claim_in_turn(sql, worker_id, limit=3, after=NO_PROJECT, token=1) == []
        await set_free(engine)


async def test_one_noisy_and_twenty_quiet_projects(database: str) -> None:
    """Four slots and sixty agents that were there first: the twenty others are answered within about a round."""
    permits = asyncio.Semaphore(0)
    answered: list[UUID] = []

    async def slow(call: ModelCall) -> Outcome:
        await permits.acquire()
        return say("hello")

    async with engine_on(database, slow) as engine:
        await add_project(engine)
        noisy = await engine.add_agents(60)
        quiet = []
        for _ in range(20):
            await add_project(engine)
            quiet += await engine.add_agents(1)
        for agent in noisy:
            await engine.say(agent, wake=False)
        [replica] = await engine.start(worker_capacity=4, claim_yield_s=0.02)
        await until(lambda: replica.worker._claimer.waiters, "others wait")
        for agent in quiet:
            await engine.say(agent)

        async def answers() -> list[UUID]:
            query = "select agent_id from events where kind = 'model_output' order by created_at"
            return [row[0] for row in await engine.sql.fetch(query)]

        for count in range(1, 81):
            permits.release()

            async def counted(count: int = count) -> bool:
                return len(await answers()) >= count

            await until(counted, f"answer {count}")
        answered = await answers()
        last = max(answered.index(agent) for agent in quiet)
        # Four noisy ones ran already, each round of the projects has one, and once a second the oldest four go first.
        assert last < 50, f"the last of the quiet ones was number {last + 1} of {len(answered)}"
        await engine.until_idle(*noisy, *quiet)
