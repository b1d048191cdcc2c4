"""Pages: every row once, in order, in both directions, whatever the page size."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import pytest

from omnara.db import reads as db_reads
from omnara.domain.content import TextBlock
from omnara.engine import lifecycle, reads
from omnara.engine.inputs import create_input
from omnara.engine.results import submit_result
from omnara.engine.scope import AgentPath
from omnara.engine.status import agent_status
from omnara.errors import InvalidRequest, NotFound
from omnara.ids import new_uuid
from tests.support.engine_case import ASK, LOOK, Engine


async def story(engine: Engine) -> AgentPath:
    """1 config; 2 message, 3 output, 4+5 results, 6 output; 7+8 steering, 9 output with a question."""
    path = await engine.agent("go")
    for call in await engine.turn(path, [LOOK, LOOK]):
        await submit_result(engine.deps, engine.p, path, call, "succeeded", [])
    await engine.turn(path)
    for text in ("a", "b"):
        await create_input(engine.deps, engine.p, path, [TextBlock(text)], mode="steering")
    await engine.turn(path, [ASK])
    assert len(await engine.log(path)) == 9
    return path


EVENTS_FORWARDS_AND_BACKWARDS: list[Any] = [1, 2, 4, 9, 50]


async def test_events_forwards_and_backwards(engine: Engine) -> None:
    path = await story(engine)
    for limit in EVENTS_FORWARDS_AND_BACKWARDS:
        seen: list[int] = []
        after = 0
        while True:
            page = await reads.events_after(engine.deps, engine.p, path, after, limit)
            seen += [row.sequence for row in page.rows]
            if not page.more:
                break
            after = page.rows[-1].sequence
        assert seen == list(range(1, 10))
        back: list[int] = []
        before = 0
        while True:
            page = await reads.events_before(engine.deps, engine.p, path, before, limit)
            back = [row.sequence for row in page.rows] + back
            if not page.more:
                break
            before = page.rows[0].sequence
        assert back == seen
        empty = await reads.events_after(engine.deps, engine.p, path, 9, limit)
        assert (empty.rows, empty.more) == ([], False)


@pytest.mark.parametrize("large", [secrets.token_hex(200_000), "x" * 400_000], ids=["dense", "compressed"])
async def test_a_page_of_large_events_ends_early(engine: Engine, large: str) -> None:
    """Five hundred outputs may have megabytes each, and a page of them is held in memory, unpacked."""
    path = await engine.agent("go")
    await engine.turn(path)
    for _ in range(5):
        await create_input(engine.deps, engine.p, path, [TextBlock(large)], mode="steering")
    await engine.turn(path)
    every = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = await reads.events_after(engine.deps, engine.p, path, 0, 50)
    assert (first.more, 4 <= len(first.rows) < 9) == (True, True)
    rest = await reads.events_after(engine.deps, engine.p, path, first.rows[-1].sequence, 50)
    assert ([row.sequence for row in [*first.rows, *rest.rows]], rest.more) == (every, False)
    last = await reads.events_before(engine.deps, engine.p, path, 0, 50)
    assert (last.more, last.rows[-1].sequence, 1 < len(last.rows) < 9) == (True, 9, True)
    others = await reads.events_before(engine.deps, engine.p, path, last.rows[0].sequence, 50)
    assert ([row.sequence for row in [*others.rows, *last.rows]], others.more) == (every, False)
    [turn, *_] = (await reads.list_turns(engine.deps, engine.p, path, 0, 10)).rows
    some = await reads.list_turn_events(engine.deps, engine.p, path, turn.row.id, 0, 50)
    assert (some.more, some.rows[-1].sequence, len(some.rows) < 6) == (True, 9, True)


@pytest.mark.parametrize("large", [secrets.token_hex(200_000), "x" * 400_000], ids=["dense", "compressed"])
async def test_a_page_of_turns_with_large_messages_ends_early(engine: Engine, large: str) -> None:
    path = await engine.agent("go")
    await engine.turn(path)
    for _ in range(6):
        await create_input(engine.deps, engine.p, path, [TextBlock(large)], mode="queued")
        await engine.turn(path)
    seen: list[int] = []
    sizes: list[int] = []
    before, more = 0, True
    while more:
        page = await reads.list_turns(engine.deps, engine.p, path, before, 50)
        seen += [turn.row.turn_sequence for turn in page.rows]
        sizes.append(sum(len(event.payload) for turn in page.rows for event in turn.openings))
        before, more = page.rows[-1].row.turn_sequence, page.more
    assert seen == [8, 7, 6, 5, 4, 3, 2, 1]
    assert all(size < 2**20 + 500_000 for size in sizes), sizes
    assert len(sizes) >= 2


async def test_a_turn_that_is_larger_than_a_page_is_one(engine: Engine) -> None:
    path = await engine.agent("go")
    await engine.turn(path)
    for _ in range(4):
        await create_input(engine.deps, engine.p, path, [TextBlock("x" * 400_000)], mode="steering")
    await engine.turn(path)
    page = await reads.list_turns(engine.deps, engine.p, path, 0, 50)
    assert ([turn.row.turn_sequence for turn in page.rows], page.more) == ([3], True)
    assert len(page.rows[0].openings) == 4


async def test_turns_with_their_noteworthy_events(engine: Engine) -> None:
    path = await story(engine)
    page = await reads.list_turns(engine.deps, engine.p, path, 0, 10)
    assert not page.more
    shown = [
        (
            turn.row.turn_sequence,
            turn.event_count,
            [event.sequence for event in turn.openings],
            turn.latest.sequence if turn.latest else None,
            turn.latest_semantic.sequence if turn.latest_semantic else None,
        )
        for turn in page.rows
    ]
    assert shown == [(3, 3, [7, 8], 9, 8), (2, 5, [2], 6, 6), (1, 1, [1], 1, 1)]
    first = await reads.list_turns(engine.deps, engine.p, path, 0, 2)
    assert first.more
    rest = await reads.list_turns(engine.deps, engine.p, path, first.rows[-1].row.turn_sequence, 2)
    assert [turn.row.turn_sequence for turn in rest.rows] == [1]
    turn = page.rows[1].row
    events = await reads.list_turn_events(engine.deps, engine.p, path, turn.id, 0, 3)
    assert ([event.sequence for event in events.rows], events.more) == ([4, 5, 6], True)
    events = await reads.list_turn_events(engine.deps, engine.p, path, turn.id, 4, 3)
    assert ([event.sequence for event in events.rows], events.more) == ([2, 3], False)
    events = await reads.list_turn_events(engine.deps, engine.p, path, page.rows[0].row.id, 0, 10)
    assert [event.sequence for event in events.rows] == [7, 8, 9]
    with pytest.raises(NotFound):
        await reads.list_turn_events(engine.deps, engine.p, path, new_uuid(), 0, 10)


async def test_a_page_of_calls_with_large_inputs_ends_early(engine: Engine) -> None:
    path = await engine.agent("go")
    large = [msgspec.structs.replace(LOOK, input={"text": secrets.token_hex(200_000)}) for _ in range(6)]
    await engine.turn(path, large)
    first = await reads.list_tool_calls(engine.deps, engine.p, path, limit=50)
    assert (first.more, 1 < len(first.rows) < 6) == (True, True)
    last = first.rows[-1]
    rest = await reads.list_tool_calls(engine.deps, engine.p, path, after=(last.created_at, last.id), limit=50)
    assert ([row.ordinal for row in [*first.rows, *rest.rows]], rest.more) == ([0, 1, 2, 3, 4, 5], False)


async def test_calls_and_forms_in_pages(engine: Engine) -> None:
    path = await story(engine)
    page = await reads.list_tool_calls(engine.deps, engine.p, path, limit=2)
    assert ([row.name for row in page.rows], page.more) == (["look", "look"], True)
    last = page.rows[-1]
    page = await reads.list_tool_calls(engine.deps, engine.p, path, after=(last.created_at, last.id))
    assert [(row.name, row.state) for row in page.rows] == [("ask_question", "waiting")]
    page = await reads.list_tool_calls(engine.deps, engine.p, path, state="completed", call_type="custom")
    assert len(page.rows) == 2
    agent, forms = await reads.list_interactions(engine.deps, engine.p, path, state="open")
    assert agent.id == path.agent_id
    assert [form.kind for form in forms.rows] == ["question"]
    _, forms = await reads.list_interactions(engine.deps, engine.p, path, state="resolved")
    assert forms.rows == []


async def test_steps_for_people(engine: Engine) -> None:
    path = await story(engine)
    page = await reads.list_steps(engine.deps, engine.p, path)
    assert [(row.step, row.kind, row.status) for row in page.rows] == [(n, "model", "succeeded") for n in (1, 2, 3)]
    assert len(msgspec.json.decode(page.rows[0].tool_request or "[]")) == 2
    assert len(msgspec.json.decode(page.rows[0].tool_response or "[]")) == 2
    assert msgspec.json.decode(page.rows[1].llm_output or "[]")[0]["text"] == "Done."


AGENTS_IN_EVERY_ORDER: list[Any] = ["name", "-name", "created_at", "-created_at", "updated_at", "-updated_at"]


async def test_agents_in_every_order(engine: Engine) -> None:
    names = ["beta", "alpha", "beta", "delta", "alpha"]
    for name in names:
        await engine.launch(name=name)
    for sort in AGENTS_IN_EVERY_ORDER:
        seen = []
        after = None
        while True:
            page = await reads.list_agents(engine.deps, engine.p, engine.project, sort=sort, after=after, limit=2)
            seen += page.rows
            if not page.more:
                break
            last = page.rows[-1]
            after = (getattr(last, sort.lstrip("-")), last.id)
        assert len({row.id for row in seen}) == 5
        keys = [(getattr(row, sort.lstrip("-")), row.id) for row in seen]
        assert keys == sorted(keys, reverse=sort.startswith("-"))


NAME_GLOBS: list[Any] = [
    ("alpha", 1),
    ("ALPHA", 1),
    ("a*", 2),
    ("*a", 2),
    ("a?pha", 1),
    ("100%", 0),
    ("100\\%", 0),
    ("a_pha", 0),
    ("*%*", 1),
    ("*\\**", 1),
    ("*\\\\*", 1),
]


async def test_name_globs(engine: Engine) -> None:
    for name in ("alpha", "beta", "100% sure", "star * back \\ slash", "a.pha two"):
        await engine.launch(name=name)
    for glob, found in NAME_GLOBS:
        page = await reads.list_agents(engine.deps, engine.p, engine.project, name=glob)
        assert len(page.rows) == found


@pytest.mark.parametrize("glob", ["*", "?*", "a\\"])
def test_globs_that_say_nothing_are_refused(glob: str) -> None:
    with pytest.raises(InvalidRequest):
        reads.glob_pattern(glob)


async def test_operators_find_what_needs_them(engine: Engine) -> None:
    paths = [await engine.agent() for _ in range(3)]
    await engine.fetch("update agent_sched set gate = 'crashed' where agent_id = $1", paths[1].agent_id)
    page = await reads.list_overview(engine.deps, engine.p, engine.project, status="crashed")
    assert [row.agent_id for row in page.rows] == [paths[1].agent_id]
    page = await reads.list_overview(engine.deps, engine.p, engine.project, limit=2)
    assert (len(page.rows), page.more) == (2, True)
    await lifecycle.archive(engine.deps, engine.p, paths[0])
    page = await reads.list_overview(engine.deps, engine.p, engine.project)
    assert [row.agent_id for row in page.rows] == [paths[2].agent_id, paths[1].agent_id]
    page = await reads.list_overview(engine.deps, engine.p, engine.project, status="archived")
    assert [row.agent_id for row in page.rows] == [paths[0].agent_id]


@pytest.mark.parametrize(
    ("stored", "total"),
    [
        ("99999999999999999999", 2**53 - 1),
        ("9223372036854775807", 2**53 - 1),
        ("-9223372036854775808", 20),
        ("1e300", 2**53 - 1),
    ],
)
async def test_absurd_counts_that_are_stored_do_not_hide_an_agent(engine: Engine, stored: str, total: int) -> None:
    path = await engine.agent("go")
    for _ in range(3):
        await engine.turn(path)
        await create_input(engine.deps, engine.p, path, [TextBlock("more")], mode="queued")
    usage = f'{{"input_tokens_total":{stored}}}'
    newest = "select max(number) from steps where agent_id = $1 and usage is not null"
    await engine.fetch(
        f"update steps set usage = $2 where agent_id = $1 and number = ({newest})",
        path.agent_id,
        usage,
    )
    found = await agent_status(engine.deps, engine.p, path)
    assert found.usage == {"input_tokens_total": total}


async def test_every_query_is_valid_and_described(engine: Engine) -> None:
    from omnara.db.sqlfiles import Queries

    async with engine.deps.db.acquire() as connection:
        for group in (
            "accounts", "agents", "calls", "catalog", "configs", "inputs", "interactions", "reads", "secrets",
        ):  # fmt: skip
            queries = Queries(group)
            for name in queries:
                await connection.prepare(queries[name])
                assert queries.describe(name).description, f"{group}.{name}"


async def test_tokens_are_added_up_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks adds up only what came since the sums were last kept, and misses none of it."""
    monkeypatch.setattr("omnara.engine.status.KEEP_EVERY", 2)
    path = await engine.agent("go")

    async def tokens() -> dict[str, int]:
        return (await agent_status(engine.deps, engine.p, path)).usage

    async def through() -> int | None:
        rows = await engine.fetch("select through from agent_usage where agent_id = $1", path.agent_id)
        return rows[0]["through"] if rows else None

    assert (await tokens(), await through()) == ({}, None)
    for turn in range(1, 6):
        claim = await engine.claim(path)
        await engine.begin_model(claim)
        before = {"input_tokens_total": 10 * (turn - 1)} if turn > 1 else {}
        assert await tokens() == before
        kept = await through()
        assert kept is None or kept < turn, "the step under way may yet count"
        await engine.save_output(claim)
        assert await tokens() == {"input_tokens_total": 10 * turn}
        await create_input(engine.deps, engine.p, path, [TextBlock("more")], mode="queued")
    assert (await through() or 0) >= 4
    await engine.fetch("update steps set usage = null where agent_id = $1 and number <= 4", path.agent_id)
    assert await tokens() == {"input_tokens_total": 50}, "steps that were added up are read again"


async def test_sums_never_go_back(engine: Engine) -> None:
    """Two readers keep their sums at a time; the one that saw less comes last."""
    agent_id = (await engine.agent()).agent_id
    async with engine.deps.db.acquire() as connection:
        await db_reads.keep_usage(connection, agent_id, 7, {"input_tokens_total": 70})
        await db_reads.keep_usage(connection, agent_id, 5, {"input_tokens_total": 50})
        assert (await db_reads.usage_sums(connection, agent_id)).sums == {"input_tokens_total": 70}
