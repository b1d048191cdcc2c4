"""The queue of waiting messages: moved, taken back, turned into steering, while workers admit from it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable
from uuid import UUID

import msgspec
import pytest

from omnara.access.principals import ProjectRole
from omnara.domain.claim import Claim
from omnara.domain.content import TextBlock
from omnara.engine import backlog, lifecycle, results
from omnara.engine.inputs import DeliveryMode, create_input
from omnara.engine.scope import AgentPath
from omnara.errors import Forbidden, InvalidRequest, NotFound, StateTransitionConflict
from omnara.ids import new_uuid
from tests.integration.test_engine_inputs import org_key
from tests.support.engine_case import ASK, LOOK, Engine, texts


async def say(engine: Engine, path: AgentPath, text: str, mode: DeliveryMode = "queued") -> UUID:
    return (await create_input(engine.deps, engine.p, path, [TextBlock(text)], mode=mode)).input.id


async def fill(engine: Engine, path: AgentPath, count: int) -> list[UUID]:
    return [await say(engine, path, f"m{n}") for n in range(count)]


async def queue(engine: Engine, path: AgentPath) -> list[UUID]:
    page = await backlog.list_queued(engine.deps, engine.p, path, limit=1000)
    ranks = [row.rank for row in page.rows]
    assert ranks == sorted(set(ranks)), "two messages share a rank"
    return [row.input.id for row in page.rows]


async def move(
    engine: Engine, path: AgentPath, what: UUID, position: backlog.Position, anchor: UUID | None = None
) -> None:
    await backlog.move(engine.deps, engine.p, path, what, position, anchor)


async def look(engine: Engine, path: AgentPath) -> None:
    """Make the agent ready, as the real worker does after a save while messages wait."""
    await engine.fetch(
        "update agent_sched set ready_at = statement_timestamp() where agent_id = $1 and worker_id is null",
        path.agent_id,
    )


async def turn(engine: Engine, path: AgentPath) -> None:
    await look(engine, path)
    await engine.turn(path)


async def test_every_position(engine: Engine) -> None:
    path = await engine.agent()
    a, b, c, d = await fill(engine, path, 4)
    for what, position, anchor, expected in (
        (c, "front", None, [c, a, b, d]),
        (c, "front", None, [c, a, b, d]),
        (a, "back", None, [c, b, d, a]),
        (a, "back", None, [c, b, d, a]),
        (a, "before", b, [c, a, b, d]),
        (a, "before", b, [c, a, b, d]),
        (c, "after", d, [a, b, d, c]),
        (c, "after", a, [a, c, b, d]),
        (d, "before", a, [d, a, c, b]),
        (b, "after", c, [d, a, c, b]),
    ):
        await move(engine, path, what, position, anchor)  # type: ignore[arg-type]
        assert await queue(engine, path) == expected, (position, anchor)
    e = await say(engine, path, "last")
    assert await queue(engine, path) == [d, a, c, b, e], "a new message goes behind everything that was moved"


async def test_the_worker_admits_in_the_new_order(engine: Engine) -> None:
    path = await engine.agent()
    first, second, third = await fill(engine, path, 3)
    steer = await say(engine, path, "steer", "steering")
    await move(engine, path, third, "front")
    await backlog.cancel(engine.deps, engine.p, path, first)
    for _ in range(3):
        await turn(engine, path)
    said = [p["content_blocks"][0]["text"] for kind, p in await engine.log(path) if p.get("input_kind") == "content"]
    assert said == ["steer", "m2", "m1"]
    states = await engine.inputs(path)
    assert [states[str(i)] for i in (first, second, third, steer)] == ["canceled", "resolved", "resolved", "resolved"]
    assert (await engine.assert_coherent(path))["ready_at"] is None


async def test_a_used_up_gap_is_made_again(engine: Engine) -> None:
    path = await engine.agent()
    model = await fill(engine, path, 6)
    for turn in range(40):
        # Each time the last but one goes between the first two: the gap halves, ten times at most.
        what = model[-2]
        await move(engine, path, what, "after", model[0])
        model.remove(what)
        model.insert(1, what)
        assert await queue(engine, path) == model, turn
    rows = await engine.fetch("select rank from inputs where kind = 'content'")
    assert all(row["rank"] > 0 for row in rows)
    assert max(row["rank"] for row in rows) < (await engine.hot(path))["next_rank"]


@pytest.mark.parametrize("seed", range(6))
async def test_any_moves_do_what_a_list_would(engine: Engine, seed: int) -> None:
    path = await engine.agent()
    dice = random.Random(seed)
    queued, steering = await fill(engine, path, 5), []
    for _ in range(120):
        act = dice.choice(("move", "move", "move", "move", "say", "cancel", "promote", "demote"))
        if act == "move" and len(queued) > 1:
            what, anchor = dice.sample(queued, 2)
            # A narrow choice of places, so that gaps are used up.
            anchor = queued[0] if dice.random() < 0.6 and what != queued[0] else anchor
            position = dice.choice(("front", "back", "before", "after"))
            beside = anchor if position in {"before", "after"} else None
            await move(engine, path, what, position, beside)  # type: ignore[arg-type]
            queued.remove(what)
            places = {"front": 0, "back": len(queued)}
            at = queued.index(anchor) + (position == "after") if beside else places[position]
            queued.insert(at, what)
        elif act == "say" and len(queued) < 12:
            queued.append(await say(engine, path, "x"))
        elif act == "cancel" and len(queued) > 3:
            await backlog.cancel(engine.deps, engine.p, path, queued.pop(dice.randrange(len(queued))))
        elif act == "promote" and len(queued) > 3:
            steering.append(queued.pop(dice.randrange(len(queued))))
            await backlog.promote(engine.deps, engine.p, path, steering[-1])
        elif act == "demote" and steering:
            queued.append(steering.pop(dice.randrange(len(steering))))
            await backlog.demote(engine.deps, engine.p, path, queued[-1])
        assert await queue(engine, path) == queued, act
    lane = await engine.fetch(
        "select id from inputs where delivery_mode = 'steering' and state = 'received' order by rank"
    )
    assert [row["id"] for row in lane] == steering


async def test_parallel_moves_serialise(engine: Engine) -> None:
    path = await engine.agent()
    ids = await fill(engine, path, 8)
    before = (await engine.hot(path))["inputs_gen"]
    async with asyncio.timeout(30):
        await asyncio.gather(*(move(engine, path, what, "front") for what in ids for _ in range(5)))
        await asyncio.gather(*(move(engine, path, ids[n], "before", ids[7 - n]) for n in range(8)))
    assert set(await queue(engine, path)) == set(ids)
    assert (await engine.hot(path))["inputs_gen"] == before + 48, "every change makes a claim holder look again"
    deadlocks = await engine.fetch("select deadlocks from pg_stat_database where datname = current_database()")
    assert deadlocks[0][0] == 0


async def test_what_no_longer_waits_is_a_conflict(engine: Engine) -> None:
    path = await engine.agent()
    admitted, waits, steers = *await fill(engine, path, 2), await say(engine, path, "s", "steering")
    await turn(engine, path)
    await turn(engine, path)
    steers = await say(engine, path, "s", "steering")
    canceled = await say(engine, path, "c")
    await backlog.cancel(engine.deps, engine.p, path, canceled)
    for gone in (admitted, canceled, steers):
        for attempt in (
            backlog.cancel(engine.deps, engine.p, path, gone),
            backlog.promote(engine.deps, engine.p, path, gone),
            move(engine, path, gone, "front"),
            move(engine, path, waits, "after", gone),
        ):
            with pytest.raises(StateTransitionConflict):
                await attempt
    for queued in (admitted, canceled, waits):
        with pytest.raises(StateTransitionConflict):
            await backlog.demote(engine.deps, engine.p, path, queued)
    with pytest.raises(StateTransitionConflict):
        await move(engine, path, waits, "before", waits)
    with pytest.raises(StateTransitionConflict):
        await move(engine, path, waits, "before", new_uuid())
    for anchor, position in ((None, "before"), (None, "after"), (steers, "front"), (steers, "back")):
        with pytest.raises(InvalidRequest):
            await move(engine, path, waits, position, anchor)  # type: ignore[arg-type]
    opened = (await engine.fetch("select id from inputs where kind = 'config_change'"))[0]["id"]
    with pytest.raises(StateTransitionConflict):
        await backlog.cancel(engine.deps, engine.p, path, opened)
    other = await engine.agent()
    with pytest.raises(NotFound):
        await backlog.cancel(engine.deps, engine.p, other, waits)
    assert await queue(engine, path) == [waits]
    await lifecycle.archive(engine.deps, engine.p, path)
    with pytest.raises(StateTransitionConflict):
        await move(engine, path, waits, "front")
    assert await queue(engine, path) == []


async def test_promotion_steers_and_demotion_waits_again(engine: Engine) -> None:
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    await engine.park(claim)
    assert (await engine.hot(path))["retry_at"] is not None
    first, second = await fill(engine, path, 2)
    await backlog.promote(engine.deps, engine.p, path, second)
    assert await queue(engine, path) == [first]
    await backlog.demote(engine.deps, engine.p, path, second)
    assert await queue(engine, path) == [first, second]
    await backlog.promote(engine.deps, engine.p, path, second)
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] <= (await engine.fetch("select statement_timestamp() as now"))[0]["now"]
    await engine.turn(path)
    states = await engine.inputs(path)
    assert (states[str(first)], states[str(second)]) == ("received", "resolved"), "steering goes before the retry"
    await look(engine, path)


async def test_promotion_cancels_open_forms_and_nothing_else(engine: Engine) -> None:
    path = await engine.agent("go")
    asked, custom = await engine.turn(path, [ASK, LOOK])
    waits = await say(engine, path, "never mind")
    await backlog.promote(engine.deps, engine.p, path, waits, cancel_open_interactions=True)
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["ready_at"]) == (1, None)
    [form] = await engine.fetch("select state, reason, resolved_by_input_id from interactions")
    assert tuple(form) == ("canceled", "superseded_by_input", waits)
    [call] = await engine.fetch("select outcome from tool_calls where id = $1", asked)
    assert call["outcome"] == "canceled"
    assert ("events", path.agent_id) in engine.hints
    await results.submit_result(engine.deps, engine.p, path, custom, "succeeded", [])
    await engine.turn(path)
    assert (await engine.inputs(path))[str(waits)] == "resolved"


async def test_a_change_makes_the_claim_holder_read_again(engine: Engine) -> None:
    """The holder knows the queue from before; what it begins next must not be what was taken back meanwhile."""
    path = await engine.agent("go")
    claim = await engine.claim(path)
    await engine.begin_model(claim)
    first, second = await fill(engine, path, 2)
    claim.inputs_gen = (await engine.hot(path))["inputs_gen"]
    await backlog.cancel(engine.deps, engine.p, path, first)
    done = await engine.go_on(claim)
    assert not done.begun, "the next step was begun on a queue that is no more"
    await engine.turn(path)
    states = await engine.inputs(path)
    assert (states[str(first)], states[str(second)]) == ("canceled", "received")
    await look(engine, path)


async def test_changes_race_with_admission(engine: Engine) -> None:
    path = await engine.agent()
    ids = await fill(engine, path, 12)
    outcomes: Counter[str] = Counter()

    async def attempt(work: Awaitable[None]) -> None:
        try:
            await work
            outcomes["done"] += 1
        except StateTransitionConflict:
            outcomes["late"] += 1

    async def admit() -> None:
        claim: Claim | None = None
        while await engine.fetch("select from inputs where state = 'received' and agent_id = $1", path.agent_id):
            await look(engine, path)
            # What is refused found the row locked or the queue changed, as it should; the database says where we are.
            with contextlib.suppress(AssertionError):
                if claim is None or (await engine.hot(path))["worker_id"] is None:
                    claim = await engine.claim(path)
                await engine.begin_model(claim)
                for _ in range(1000):
                    if await engine.save_output(claim) is not None:
                        break

    async def rearrange() -> None:
        for n in range(40):
            what, anchor = random.Random(n).sample(ids, 2)
            await attempt(move(engine, path, what, "before", anchor))
            if n % 9 == 0:
                await attempt(backlog.cancel(engine.deps, engine.p, path, what))
            if n % 7 == 0:
                await attempt(backlog.promote(engine.deps, engine.p, path, anchor))

    async with asyncio.timeout(60):
        await asyncio.gather(rearrange(), rearrange(), admit())
    await engine.assert_coherent(path)
    assert outcomes["late"] > 0
    rows = await engine.fetch("select id, state from inputs where kind = 'content'")
    admitted = [p["agent_input_id"] for _, p in await engine.log(path) if p.get("input_kind") == "content"]
    assert len(admitted) == len(set(admitted)) == sum(row["state"] == "resolved" for row in rows)
    assert {row["state"] for row in rows} <= {"resolved", "canceled"}, "nothing is left behind"


async def test_pages_survive_what_happens_between_them(engine: Engine) -> None:
    path = await engine.agent()
    ids = await fill(engine, path, 7)

    async def page(after: tuple[int, UUID] | None) -> tuple[list[UUID], tuple[int, UUID] | None]:
        found = await backlog.list_queued(engine.deps, engine.p, path, after=after, limit=2)
        key = (found.rows[-1].rank, found.rows[-1].input.id) if found.rows else None
        return [row.input.id for row in found.rows], key

    shown, key = await page(None)
    assert shown == ids[:2]
    await backlog.cancel(engine.deps, engine.p, path, ids[1])
    shown, key = await page(key)
    assert shown == ids[2:4], "the place outlives the item that named it"
    for gone in (ids[0], *ids[2:]):
        await backlog.cancel(engine.deps, engine.p, path, gone)
    assert await page(key) == ([], None)


async def test_rights(engine: Engine) -> None:
    path = await engine.agent()
    [waits] = await fill(engine, path, 1)
    viewer = org_key(engine, ProjectRole.VIEWER)
    assert [texts(row.input) for row in (await backlog.list_queued(engine.deps, viewer, path)).rows] == [["m0"]]
    for attempt in (
        backlog.cancel(engine.deps, viewer, path, waits),
        backlog.move(engine.deps, viewer, path, waits, "back"),
        backlog.promote(engine.deps, viewer, path, waits),
        backlog.demote(engine.deps, viewer, path, waits),
    ):
        with pytest.raises(Forbidden):
            await attempt
    stranger = msgspec.structs.replace(viewer, project_grants={})
    with pytest.raises(NotFound):
        await backlog.list_queued(engine.deps, stranger, path)
    with pytest.raises(NotFound):
        await backlog.cancel(engine.deps, stranger, path, waits)
