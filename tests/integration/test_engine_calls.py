"""Custom results and answers to forms: exactly one wins, and the log stays well-formed."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import INTERRUPTED_TEXT, MediaRefBlock, StructuredDataBlock, TextBlock
from omnara.engine import interactions, lifecycle
from omnara.engine.cancel import cancel_agent
from omnara.engine.results import SubmittedResult, submit_result
from omnara.engine.scope import AgentPath
from omnara.errors import Conflict, InvalidRequest, NotFound, RequestTooLarge
from omnara.ids import new_uuid
from omnara.tools.interactions import Answer
from tests.support.engine_case import ASK, LOOK, Call, Engine, needs_permission

ALLOW = [Answer((0,))]
DENY = [Answer((1,), " too risky ")]
FETCH = Call("web_fetch", "built_in", "ready", {"url": "https://example.org"})


async def submit(
    engine: Engine, path: AgentPath, call: UUID, text: str = "ok", outcome: Any = "succeeded"
) -> SubmittedResult:
    return await submit_result(engine.deps, engine.p, path, call, outcome, [TextBlock(text)])


async def form_of(engine: Engine, call: UUID, kind: str | None = None) -> UUID:
    rows = await engine.fetch("select id, kind from interactions where tool_call_id = $1", call)
    found: UUID = next(row["id"] for row in rows if kind in (None, row["kind"]))
    return found


async def outcomes(engine: Engine, path: AgentPath) -> list[str]:
    return [payload["outcome"] for kind, payload in await engine.log(path) if kind == "tool_result"]


# --- custom results ---------------------------------------------------------------------------------------


async def test_the_last_result_of_a_batch_wakes_the_agent(engine: Engine) -> None:
    path = await engine.agent("go")
    one, two = await engine.turn(path, [LOOK, LOOK])
    done = await submit(engine, path, two)
    assert (done.call.state, done.call.outcome, done.event.kind) == ("completed", "succeeded", "tool_result")
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["ready_at"]) == (1, None)
    await submit(engine, path, one, outcome="failed")
    hot = await engine.assert_coherent(path)
    assert (hot["open_calls"], hot["batch_sequence"], hot["turn_open"]) == (0, None, True)
    assert hot["ready_at"] is not None
    await engine.turn(path)
    assert not (await engine.assert_coherent(path))["turn_open"]


async def test_twenty_results_for_one_call_make_one(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    answers = await asyncio.gather(*(submit(engine, path, call, f"{n}") for n in range(20)), return_exceptions=True)
    assert sum(isinstance(item, SubmittedResult) for item in answers) == 1
    assert all(isinstance(item, (SubmittedResult, Conflict)) for item in answers)
    assert await outcomes(engine, path) == ["succeeded"]
    with pytest.raises(Conflict):
        await submit(engine, path, call, "0")
    await engine.assert_coherent(path)


async def test_results_of_many_calls_at_once_keep_the_log_gapless(engine: Engine) -> None:
    path = await engine.agent("go")
    calls = await engine.turn(path, [LOOK] * 16)
    await asyncio.gather(*(submit(engine, path, call) for call in calls))
    assert len(await outcomes(engine, path)) == 16
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] is not None


async def test_results_while_the_holder_saves_another_one(engine: Engine) -> None:
    """The claim's holder completes its call, the client completes its own; neither counts the other's."""
    path = await engine.agent("go")
    custom, fetch = await engine.turn(path, [LOOK, FETCH])
    await engine.fetch("update agent_sched set ready_at = now() where agent_id = $1", path.agent_id)
    claim = await engine.claim(path)
    await engine.fetch("update tool_calls set state = 'running' where id = $1", fetch)
    await asyncio.gather(submit(engine, path, custom), engine.save_result(claim, fetch))
    assert await outcomes(engine, path) == ["succeeded", "succeeded"]
    hot = await engine.assert_coherent(path)
    assert hot["open_calls"] == 0
    assert hot["ready_at"] is not None


async def test_only_ready_custom_calls_take_results(engine: Engine) -> None:
    path = await engine.agent("go")
    asked, waiting = await engine.turn(path, [ASK, needs_permission(LOOK)])
    for call in (asked, waiting):
        with pytest.raises(Conflict):
            await submit(engine, path, call)
    with pytest.raises(NotFound):
        await submit(engine, path, new_uuid())
    other = await engine.agent()
    with pytest.raises(NotFound):
        await submit(engine, other, waiting)
    assert await outcomes(engine, path) == []


async def test_result_blocks_are_checked_and_cleaned(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [LOOK])
    for blocks, error in (
        ([MediaRefBlock("art_x")], InvalidRequest),
        ([TextBlock("x" * (1024 * 1024))], RequestTooLarge),
    ):
        with pytest.raises(error):
            await submit_result(engine.deps, engine.p, path, call, "succeeded", blocks)
    done = await submit_result(
        engine.deps, engine.p, path, call, "succeeded", [StructuredDataBlock({"a\x00": ["b\ud800"]}), TextBlock("")]
    )
    assert msgspec.json.decode(done.content)[0]["value"] == {"a\ufffd": ["b\ufffd"]}
    assert (await engine.log(path))[-1][1]["content_blocks"][0]["value"] == {"a\ufffd": ["b\ufffd"]}


@pytest.mark.parametrize("gate", ["paused", "crashed"])
async def test_results_and_answers_are_taken_behind_a_closed_gate(engine: Engine, gate: str) -> None:
    path = await engine.agent("go")
    call, asked = await engine.turn(path, [LOOK, ASK])
    await engine.fetch("update agent_sched set gate = $2 where agent_id = $1", path.agent_id, gate)
    await submit(engine, path, call)
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, asked), ALLOW)
    hot = await engine.assert_coherent(path)
    assert (hot["gate"], hot["open_calls"]) == (gate, 0)


# --- forms ------------------------------------------------------------------------------------------------


async def test_an_answer_completes_the_question(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [ASK])
    form = await form_of(engine, call)
    row = await interactions.resolve(engine.deps, engine.p, path, form, [Answer((2,), " green ")])
    assert (row.state, row.resolved_by) == ("resolved", engine.p.public_id)
    log = await engine.log(path)
    assert [kind for kind, _ in log[-2:]] == ["agent_input", "tool_result"]
    assert log[-2][1]["input_kind"] == "interaction_response"
    assert log[-1][1]["outcome"] == "succeeded"
    answer = log[-1][1]["content_blocks"][0]["value"]["answers"][0]
    assert (answer["selected_options"][0]["label"], answer["text"]) == ("Other", "green")
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] is not None
    rows = await engine.fetch(
        "select is_semantic from events where agent_id = $1 order by sequence desc limit 2", path.agent_id
    )
    assert [r["is_semantic"] for r in rows] == [False, True]


async def test_twenty_answers_have_one_winner(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [needs_permission(LOOK)])
    form = await form_of(engine, call)
    answers = await asyncio.gather(
        *(
            interactions.resolve(engine.deps, engine.p, path, form, ALLOW if n % 2 else [Answer((1,))])
            for n in range(20)
        ),
        return_exceptions=True,
    )
    won = [item for item in answers if not isinstance(item, Exception)]
    lost = [item for item in answers if isinstance(item, Exception)]
    assert len(won) == 10, "the same answer by the same caller is a replay, another one conflicts"
    assert all(isinstance(item, Conflict) for item in lost)
    assert len({item.resolution for item in won}) == 1
    responses = [p for _, p in await engine.log(path) if p.get("input_kind") == "interaction_response"]
    assert len(responses) == 1
    assert len(await outcomes(engine, path)) <= 1
    await engine.assert_coherent(path)


async def test_the_same_answer_by_somebody_else_conflicts(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [ASK])
    form = await form_of(engine, call)
    await interactions.resolve(engine.deps, engine.p, path, form, ALLOW)
    await interactions.resolve(engine.deps, engine.p, path, form, ALLOW)
    other = msgspec.structs.replace(engine.p, id=new_uuid())
    with pytest.raises(Conflict):
        await interactions.resolve(engine.deps, other, path, form, ALLOW)


async def test_permission_lets_each_kind_of_call_go_on_its_own_way(engine: Engine) -> None:
    path = await engine.agent("go")
    custom, fetch, ask = await engine.turn(path, [needs_permission(c) for c in (LOOK, FETCH, ASK)])
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, custom), ALLOW)
    assert (await engine.assert_coherent(path))["ready_at"] is None, "the client runs it"
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, ask, "permission"), ALLOW)
    hot = await engine.assert_coherent(path)
    assert (hot["ready_at"], hot["open_calls"]) == (None, 3)
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, fetch), ALLOW)
    assert (await engine.assert_coherent(path))["ready_at"] is not None, "the engine runs it"
    rows = {row["id"]: row["state"] for row in await engine.fetch("select id, state from tool_calls")}
    assert [rows[call] for call in (custom, fetch, ask)] == ["ready", "ready", "waiting"]
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, ask, "question"), ALLOW)
    assert (await engine.assert_coherent(path))["open_calls"] == 2


async def test_denial_ends_the_call_with_the_reason(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [needs_permission(FETCH)])
    await interactions.resolve(engine.deps, engine.p, path, await form_of(engine, call), DENY)
    kind, payload = (await engine.log(path))[-1]
    assert (kind, payload["outcome"]) == ("tool_result", "denied")
    assert payload["content_blocks"][0]["value"]["reason"] == "too risky"
    hot = await engine.assert_coherent(path)
    assert hot["ready_at"] is not None


ANSWERS_THAT_DO_NOT_FIT_CHANGE_NOTHING: list[Any] = [
    [],
    [Answer(())],
    [Answer((0, 1))],
    [Answer((7,))],
    [Answer((0,), "x")],
]


async def test_answers_that_do_not_fit_change_nothing(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [ASK])
    form = await form_of(engine, call)
    for answers in ANSWERS_THAT_DO_NOT_FIT_CHANGE_NOTHING:
        with pytest.raises(InvalidRequest):
            await interactions.resolve(engine.deps, engine.p, path, form, answers)
        assert (await engine.assert_coherent(path))["open_calls"] == 1


async def test_unknown_and_canceled_forms(engine: Engine) -> None:
    path = await engine.agent("go")
    [call] = await engine.turn(path, [ASK])
    form = await form_of(engine, call)
    with pytest.raises(NotFound):
        await interactions.resolve(engine.deps, engine.p, path, new_uuid(), ALLOW)
    await cancel_agent(engine.deps, engine.p, path)
    with pytest.raises(Conflict):
        await interactions.resolve(engine.deps, engine.p, path, form, ALLOW)


# --- against cancel ---------------------------------------------------------------------------------------


async def test_cancel_against_results_and_answers(engine: Engine) -> None:
    """Either may win for each call; there is one result each, and cancel's come after its control event."""
    for _ in range(8):
        path = await engine.agent("go")
        one, two, asked = await engine.turn(path, [LOOK, LOOK, ASK])
        form = await form_of(engine, asked)
        done = await asyncio.gather(
            submit(engine, path, one),
            cancel_agent(engine.deps, engine.p, path),
            submit(engine, path, two),
            interactions.resolve(engine.deps, engine.p, path, form, ALLOW),
            return_exceptions=True,
        )
        assert not [item for item in done if isinstance(item, Exception) and not isinstance(item, Conflict)]
        log = await engine.log(path)
        results = [payload for kind, payload in log if kind == "tool_result"]
        assert len({payload["tool_call_id"] for payload in results}) == len(results) == 3
        control = next(n for n, (_, payload) in enumerate(log) if payload.get("input_kind") == "control")
        assert all(n > control for n, (_, payload) in enumerate(log) if payload.get("outcome") == "canceled")
        assert all(n < control for n, (_, payload) in enumerate(log) if payload.get("outcome") == "succeeded")
        hot = await engine.assert_coherent(path)
        assert (hot["turn_open"], hot["ready_at"]) == (False, None)
        await lifecycle.archive(engine.deps, engine.p, path)


def test_the_interrupted_text_is_the_one_of_the_design() -> None:
    assert INTERRUPTED_TEXT == "Tool call was interrupted; its external outcome is unknown."
