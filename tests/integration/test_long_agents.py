"""An agent with a long history: what is asked about it stays cheap.

Source: field-reports B33 (whole-history reads).
"""

from __future__ import annotations

import time
from uuid import UUID

import msgspec
import pytest

from omnara.db.compaction import last_checkpoint
from omnara.db.sqlfiles import Queries, sql_root
from tests.support.engine_case import Engine
from tests.support.long_log import LongLog

CHECKS = sorted((sql_root() / "checks").glob("*.sql"))
CALLS = 10_000


async def _agent(engine: Engine, turns: int) -> UUID:
    """An agent with so many turns, whose tables have no statistics yet: the worst case for a planner."""
    launched = await engine.launch()
    agent_id: UUID = launched.agent.id
    async with engine.deps.db.acquire() as connection:
        await LongLog(connection, agent_id).grow(turns)
    return agent_id


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
async def test_every_check_is_linear_in_the_history_of_one_agent(engine: Engine, *, analyzed: bool) -> None:
    await _agent(engine, CALLS)
    if analyzed:
        await engine.fetch("analyze")
    slow = {}
    async with engine.deps.db.acquire() as connection:
        for check in CHECKS:
            start = time.perf_counter()
            assert await connection.fetch(check.read_text(encoding="utf-8"), timeout=60) == []
            slow[check.stem] = time.perf_counter() - start
    # 40,000 events: each check takes 0.2 s at most where it is linear, and half a minute where it is not.
    assert {name: round(seconds, 2) for name, seconds in slow.items() if seconds > 10} == {}


async def _broken(engine: Engine, name: str) -> list[str]:
    async with engine.deps.db.acquire() as connection:
        rows = await connection.fetch((sql_root() / "checks" / f"{name}.sql").read_text(encoding="utf-8"))
    return sorted({row["fault"] for row in rows})


@pytest.mark.parametrize(
    ("check", "damage", "repair", "fault"),
    [
        (
            "03_one_result_per_call",
            "update tool_calls set result_sequence = result_sequence + 1 where output_sequence = 3",
            "update tool_calls set result_sequence = result_sequence - 1 where output_sequence = 3",
            "a result without its own call, or a call without its own result",
        ),
        (
            "03_one_result_per_call",
            "update events set kind = 'context_checkpoint' where sequence = 4",
            "update events set kind = 'tool_result' where sequence = 4",
            "a result without its own call, or a call without its own result",
        ),
        (
            "03_one_result_per_call",
            "update tool_calls set result_sequence = 4 where output_sequence = 7",
            "update tool_calls set result_sequence = 8 where output_sequence = 7",
            "a result without its own call, or a call without its own result",
        ),
        (
            "08_turns_are_contiguous",
            "update turns set turn_sequence = 9 where turn_sequence = 4",
            "update turns set turn_sequence = 4 where turn_sequence = 9",
            "gap in turns",
        ),
        (
            "08_turns_are_contiguous",
            "update events set turn_sequence = 2 where sequence = 7",
            "update events set turn_sequence = 3 where sequence = 7",
            "event in another turn",
        ),
        (
            "08_turns_are_contiguous",
            "update turns set first_sequence = 8 where turn_sequence = 3",
            "update turns set first_sequence = 6 where turn_sequence = 3",
            "event in another turn",
        ),
    ],
    ids=["moved result", "no result", "two calls for one", "gap", "number", "range"],
)
async def test_the_checks_see_what_is_wrong(engine: Engine, check: str, damage: str, repair: str, fault: str) -> None:
    await _agent(engine, 3)
    assert await _broken(engine, check) == []
    await engine.fetch(damage)
    assert fault in await _broken(engine, check)
    await engine.fetch(repair)
    assert await _broken(engine, check) == []


async def test_an_event_of_a_turn_that_is_another_one_of_the_same_number_is_seen(engine: Engine) -> None:
    await _agent(engine, 3)
    await engine.fetch("update turns set id = gen_random_uuid() where turn_sequence = 2")
    assert await _broken(engine, "08_turns_are_contiguous") == ["event in another turn"]
    await engine.fetch("update turns t set id = e.turn_id from events e where e.sequence = 2 and t.turn_sequence = 2")


PAGES_OF_AN_INDEX = 12
"""Pages of a descent through an index and of the row that it found. The log of this test has hundreds of pages."""


@pytest.mark.parametrize("analyzed", [False, True], ids=["without statistics", "with statistics"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["none", "one far back"])
async def test_the_last_checkpoint_is_found_without_a_walk(engine: Engine, *, analyzed: bool, checkpoint: bool) -> None:
    launched = await engine.launch()
    agent_id = launched.agent.id
    explain = "explain (analyze, buffers, format json) " + Queries("compaction")["last_checkpoint"]
    async with engine.deps.db.acquire() as connection:
        log = LongLog(connection, agent_id)
        await log.grow(5)
        at = await log.checkpoint(10) if checkpoint else None
        await log.grow(CALLS // 5)
        if analyzed:
            await connection.execute("vacuum analyze events")
        row = await last_checkpoint(connection, agent_id, 1_000_000)
        assert (None if row is None else row[0]) == at
        plan = msgspec.json.decode(await connection.fetchval(explain, agent_id, 1_000_000))[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= PAGES_OF_AN_INDEX, plan
