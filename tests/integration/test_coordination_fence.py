"""The fence stands in the writing statement: whoever has lost the claim writes nothing at all (rules E, F and L).

Every kind of part that a save can have (events, turns, steps, calls, moves, forms, admissions) is in the statement that
is refused here, so that a part which is not joined to the fenced row shows. Source: coordination §2, §4, §9.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest

from omnara.db.advance import advance
from omnara.db.connection import LIMITS, ConnKind, Limits
from omnara.db.recovery import TakenAgent, lock_claim, take_away
from omnara.db.snapshot import read_for_step
from omnara.domain.advance import (
    Advance,
    BeginStep,
    CloseStep,
    MovedCall,
    NewCall,
    NewEvent,
    NewInteraction,
)
from omnara.domain.claim import Claim
from omnara.domain.content import TextBlock
from omnara.engine import cancel, inputs, lifecycle, resume
from omnara.engine.model_step import Next, advance_for, begin_model
from omnara.engine.scope import AgentPath
from omnara.ids import new_uuid
from omnara.providers.in_process import say
from omnara.worker import saver as saver_module
from tests.support.by_hand import PLAN, begun_by_hand
from tests.support.crashing import locked, owner
from tests.support.engine import Engine, engine_on
from tests.support.waiting import until

TABLES = ("agent_sched", "events", "turns", "steps", "tool_calls", "interactions", "inputs")


async def everything(engine: Engine) -> dict[str, list[str]]:
    """All rows that a save can touch, as text."""
    return {
        table: sorted(str(dict(row)) for row in await engine.sql.fetch(f"select * from {table}"))
        for table in TABLES
    }


class Case:
    """An agent in the middle of a model step, with one old running call, and a save that has every kind of part."""

    def __init__(self, engine: Engine, agent: UUID, worker_id: UUID, claim: Claim, save: Advance) -> None:
        self.engine = engine
        self.agent = agent
        self.worker_id = worker_id
        self.claim = claim
        self.save = save

    async def run(self, **changes: Any) -> Any:
        """Run the save, with some fields changed."""
        worker_id = changes.pop("worker_id", self.worker_id)
        item = msgspec.structs.replace(self.save, **changes)
        return await advance(self.engine.sql, worker_id, [item], 5)  # type: ignore[arg-type]


@pytest.fixture
async def case(database: str) -> AsyncIterator[Case]:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        worker_id, claim, begun = await begun_by_hand(engine, agent)
        old_call = new_uuid()
        await engine.sql.execute(
            """insert into tool_calls (agent_id, output_sequence, ordinal, id, turn_id, turn_sequence, provider_call_id,
                                       name, type, input, state, step_number)
               values ($1, 2, 0, $2, $3, $4, 'p0', 'old', 'built_in', '{}', 'running', $5)""",
            agent, old_call, begun.turn_id, begun.turn_sequence, begun.step_number,
        )
        await engine.say(agent, "queued")
        claim.inputs_gen += 1
        _, [queued] = await read_for_step(engine.sql, agent, 1, 0)  # type: ignore[arg-type]
        plan = msgspec.structs.replace(PLAN, config_id=claim.config_id)
        begin = begin_model(claim, plan, (queued,), 1)
        call = new_uuid()
        event = NewEvent(new_uuid(), "model_output", begun.turn_id, begun.turn_sequence, '{"x":1}')
        save = msgspec.structs.replace(
            advance_for(claim, Next("model", begin)),
            close=CloseStep(begun.step_number, "succeeded", "model"),
            events=(event,),
            calls=(NewCall(1, call, "p1", "new", "built_in", "{}", "ready"),),
            moved=(MovedCall(old_call, "running", "ready"),),
            asked=(NewInteraction(new_uuid(), call, "permission", "{}"),),
            output_position=0,
            opened=1,
            turn_open=True,
        )
        yield Case(engine, agent, worker_id, claim, save)
        # The call and its form are made up: they would not pass the checks that end every test.
        await engine.sql.execute(f"truncate {', '.join(TABLES)}, agents cascade")


async def test_a_save_with_every_part_writes_every_part(case: Case) -> None:
    """Without this, the refusals below would prove nothing."""
    before = await everything(case.engine)
    assert (await case.run())[0].begun
    after = await everything(case.engine)
    assert {table for table in TABLES if before[table] != after[table]} == set(TABLES)


@pytest.mark.parametrize("stale", ["worker_id", "claim_token", "epoch"])
async def test_each_part_of_the_fence_refuses_every_part_of_a_save(case: Case, stale: str) -> None:
    before = await everything(case.engine)
    wrong: dict[str, Any] = {
        "worker_id": new_uuid(), "claim_token": case.save.claim_token + 1, "epoch": case.save.epoch + 1
    }
    assert await case.run(**{stale: wrong[stale]}) == {}
    assert await everything(case.engine) == before


async def test_a_save_that_meets_the_taking_away_of_its_claim_writes_nothing(case: Case) -> None:
    """The claim is being taken away when the save comes: skipped while the row is locked, refused afterwards."""
    async with locked(case.engine, case.agent) as other:
        await other.execute(
            "update agent_sched set worker_id = null, claim_token = null, epoch = epoch + 1 where agent_id = $1",
            case.agent,
        )
        assert await case.run() == {}, "the row is locked: skipped"
    before = await everything(case.engine)
    assert await case.run() == {}
    assert await everything(case.engine) == before


@pytest.mark.parametrize("moved", ["inputs_gen", "gate"])
async def test_a_save_begins_nothing_when_somebody_has_written_to_the_agent(case: Case, moved: str) -> None:
    """It saves, gives the claim back and leaves the agent ready; nothing is admitted, no turn and no step is opened."""
    change = "inputs_gen = inputs_gen + 1" if moved == "inputs_gen" else "gate = 'paused'"
    await case.engine.sql.execute(f"update agent_sched set {change}")
    before = await everything(case.engine)
    done = (await case.run())[0]
    assert (done.begun, done.kept, done.ready) == (False, False, True)
    after = await everything(case.engine)
    assert {table for table in TABLES if before[table] != after[table]} == set(TABLES) - {"turns", "inputs"}
    hot = await case.engine.hot(case.agent)
    assert (hot["worker_id"], hot["claim_token"], hot["step_number"]) == (None, None, 1)
    assert hot["next_sequence"] == case.claim.next_sequence + 1
    assert await case.engine.sql.fetchval("select count(*) from steps") == 1


async def test_a_save_under_its_own_generation_forgets_no_wake_up(case: Case) -> None:
    """Released without anything to do: the message that came since the claim read leaves the agent ready."""
    await case.engine.say(case.agent, "late")
    done = (await case.run(mode="release", begin=None, ready_s=None))[0]
    assert done.ready
    assert (await case.engine.hot(case.agent))["ready_at"] is not None


async def test_giving_back_is_fenced_too(case: Case) -> None:
    """A claim that cannot be saved is given back only by who holds it: what follows takes its rows from this lock."""
    sql: Any = case.engine.sql
    token, epoch = case.claim.claim_token, case.claim.epoch
    for worker, agent, stale_token, stale_epoch in (
        (case.worker_id, case.agent, token + 1, epoch),
        (case.worker_id, case.agent, token, epoch + 1),
        (case.worker_id, new_uuid(), token, epoch),
        (new_uuid(), case.agent, token, epoch),
    ):
        assert await lock_claim(sql, agent, worker, stale_token, stale_epoch) is None
    locked = await lock_claim(sql, case.agent, case.worker_id, token, epoch)
    assert locked is not None
    assert locked.agent_id == case.agent


async def test_taking_a_claim_away_is_fenced_too(case: Case) -> None:
    sql: Any = case.engine.sql
    before = await everything(case.engine)
    taken = TakenAgent(case.agent, case.claim.epoch + 1, 0, "open", ())
    assert await take_away(sql, [taken], "interrupted") == {}
    assert await everything(case.engine) == before


async def test_a_begin_over_an_existing_step_writes_nothing(case: Case) -> None:
    """A step number that is taken (a damaged row) fails the statement as a whole."""
    await case.engine.sql.execute(
        """insert into steps
           select agent_id, number + 1, kind, attempt, frontier, call_id, turn_id, config_id, revision_id, worker_id,
                  epoch, 'failed' from steps"""
    )
    before = await everything(case.engine)
    with pytest.raises(asyncpg.UniqueViolationError):
        await case.run()
    assert await everything(case.engine) == before


async def deadlocks(engine: Engine) -> int:
    """The server's own count for this database."""
    count: int = await engine.sql.fetchval(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    return count


async def test_writers_and_saves_of_the_same_agents_never_deadlock(database: str) -> None:
    """L: messages, cancels, pauses and resumes from many tasks, while a worker's group saves touch the same agents.

    A deadlock would show in the server's own counter, even where a retry hides it from the caller.
    """
    dice = random.Random(7)

    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = await engine.add_agents(12)
        [replica] = await engine.start()
        p = owner(engine)

        async def bother(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(25):
                path = AgentPath(mine.choice(agents))
                what = mine.randrange(5)
                if what < 2:
                    await inputs.create_input(replica.deps, p, path, [TextBlock("go")])
                elif what == 2:
                    await cancel.cancel_agent(replica.deps, p, path)
                elif what == 3:
                    await lifecycle.pause(replica.deps, p, path)
                else:
                    await resume.resume(replica.deps, p, path)

        await asyncio.gather(*(bother(dice.randrange(10**6)) for _ in range(8)))
        for agent in agents:
            await resume.resume(replica.deps, p, AgentPath(agent))
        await engine.until_idle(*agents)
        assert await deadlocks(engine) == 0


async def test_two_claim_holders_lock_groups_in_one_order(database: str) -> None:
    """Groups in opposite orders, again and again: SKIP LOCKED and the order keep them from waiting for each other."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = await engine.add_agents(8)
        worker_id = new_uuid()
        await engine.sql.execute(
            """insert into workers (id, lock_key, roles, version, lease_expires_at)
               values ($1, 5, '{worker}', 'test', clock_timestamp() + interval '1 hour')""",
            worker_id,
        )
        await engine.sql.execute("update agent_sched set worker_id = $1, claim_token = 1", worker_id)
        plain = [
            Advance(
                agent_id=agent, claim_token=1, epoch=0, gen=0, turn_id=None, turn_sequence=1, step_number=0,
                known_next_sequence=2, mode="hold",
            )
            for agent in agents
        ]
        left, right = await asyncpg.connect(database), await asyncpg.connect(database)

        async def save(connection: asyncpg.Connection, items: list[Advance]) -> int:
            return sum([len(await advance(connection, worker_id, items, 5)) for _ in range(60)])  # type: ignore[arg-type]

        saved = await asyncio.gather(save(left, plain), save(right, plain[::-1]))
        assert min(saved) > 0
        assert await deadlocks(engine) == 0
        await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null")
        await left.close()
        await right.close()


async def test_a_locked_agent_does_not_hold_up_its_group(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H: one of thirty agents is locked by an API transaction for long; the other twenty-nine are saved meanwhile.

    A save that waited for the lock would wait for longer than this test.
    """
    monkeypatch.setattr(saver_module, "SAVE_TIMEOUT_S", 120.0)
    monkeypatch.setitem(LIMITS, ConnKind.SAVER, Limits(120_000, 120_000))
    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = await engine.add_agents(30)
        go = asyncio.Event()
        calls = 0

        async def script(_call: Any) -> Any:
            nonlocal calls
            calls += 1
            await go.wait()
            return say("hello")

        engine.script = script
        await engine.start()
        for agent in agents:
            await engine.say(agent)
        await until(lambda: calls == 30, "all are in their model call")
        async with locked(engine, agents[10]):
            go.set()
            others = [agent for agent in agents if agent != agents[10]]
            await engine.until_idle(*others)
            assert (await engine.hot(agents[10]))["worker_id"] is not None
        await engine.until_idle(agents[10])
        assert calls == 30


def test_the_parts_of_a_begin_are_known() -> None:
    """A field added to `BeginStep` must be carried by the statement: this list is looked at when it grows."""
    assert set(BeginStep.__struct_fields__) == {
        "kind", "attempt", "config_id", "turn_id", "new_turn", "call_id", "revision_id", "secrets", "admit"
    }
