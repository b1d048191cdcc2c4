"""Answers that their length limit cuts: they go on by themselves, for a while, and no call of theirs ever runs."""

from __future__ import annotations

from typing import Any

import msgspec

from omnara.domain.content import TextBlock
from omnara.domain.context_text import CUT_NOTICE
from omnara.domain.state import fold
from omnara.engine.authorize import CUT_OFF
from omnara.engine.model_step import MAX_CONTINUATIONS
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, ModelCall, Outcome, RequestedCall
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.engine import Engine, built_in, engine_on
from tests.support.reading import events_of


def cut(text: str = "half") -> Completed:
    return Completed("max_tokens", (TextBlock(text),) if text else (), replay=b"unsigned")


def said(call: ModelCall) -> list[str]:
    return [text for message in call.context.messages() for text in getattr(message, "texts", ())]


def outputs(events: list[tuple[int, str, dict[str, Any]]]) -> list[str]:
    return [payload["stop_reason"] for _, kind, payload in events if kind == "model_output"]


async def coherent(engine: Engine, agent: Any) -> None:
    """The hot row says what the log says."""
    hot, state = await engine.hot(agent), fold(await events_of(engine.sql, agent))
    assert (hot["turn_open"], hot["open_calls"]) == (state.turn_open, len(state.open_calls)) == (False, 0)
    await engine.check()


async def test_a_cut_answer_goes_on_in_the_same_turn(database: str) -> None:
    seen: list[list[str]] = []

    def script(call: ModelCall) -> Outcome:
        seen.append(said(call))
        return cut(f"part {len(seen)}") if len(seen) < 3 else say("the end")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "tell me")
        await engine.say(agent, "next")
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert outputs(events) == ["max_tokens", "max_tokens", "end_turn", "end_turn"]
        assert (await engine.hot(agent))["turn_sequence"] == 3
        await coherent(engine, agent)
    assert seen[1] == ["tell me", CUT_NOTICE]
    assert seen[2] == ["tell me", CUT_NOTICE, CUT_NOTICE]


async def test_an_answer_without_end_stops_after_a_few_continuations_and_says_so(database: str) -> None:
    calls = 0

    def script(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return cut("" if calls % 2 else "more")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        for _ in range(2):  # a new message has its continuations anew
            calls = 0
            await engine.say(agent)
            await engine.until_idle(agent)
            events = await engine.events(agent)
            assert calls == MAX_CONTINUATIONS + 1
            assert outputs(events)[-calls - 1 :] == ["max_tokens"] * calls + ["error"]
            assert "output_limit_reached" in events[-1][2]["content_blocks"][0]["text"]
            await coherent(engine, agent)


async def test_no_call_of_a_cut_answer_runs_and_its_result_says_why(database: str) -> None:
    ran: list[str] = []

    async def look(_call: ToolCallRequest) -> ToolResult:
        ran.append("look")
        return succeeded(TextBlock("seen"))

    def script(call: ModelCall) -> Outcome:
        turns = len(call.context.messages())
        if turns == 1:
            whole, half = call.new_call_id(), call.new_call_id()
            nothing = call.new_call_id()
            return Completed(
                "max_tokens",
                (
                    TextBlock("I look"),
                    RequestedCall(*whole, "p1", "look", {}),
                    RequestedCall(*half, "p2", "look", {}, "the arguments are not JSON"),
                    RequestedCall(*nothing, "p3", "", {}),
                ),
            )
        if turns == 3:
            results = call.context.tail()[0].results  # type: ignore[union-attr]
            assert [CUT_OFF in result.text and result.failed for result in results] == [True, True]
            return ask(call, ("look", {}))
        return say("done")

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            events = await engine.events(agent)
            await coherent(engine, agent)
    assert outputs(events) == ["max_tokens", "tool_use", "end_turn"]
    assert ran == ["look"]
    facts = [payload for _, kind, payload in events if kind == "tool_result"]
    assert [item["outcome"] for item in facts] == ["failed", "failed", "succeeded"]
    assert facts[0]["content_blocks"][0]["value"] == {"error": CUT_OFF, "error_code": "malformed"}


async def test_the_count_of_cut_answers_survives_another_worker(database: str) -> None:
    async with engine_on(database, lambda _: cut()) as engine:
        [agent] = await engine.add_agents()
        [first] = await engine.start()
        first.worker.must_yield = lambda claim: True  # type: ignore[method-assign]
        await engine.say(agent)
        await engine.until_idle(agent)
        assert (await engine.hot(agent))["epoch"] == MAX_CONTINUATIONS + 1
        rows = await engine.sql.fetch("select meta from events where agent_id = $1 and meta is not null", agent)
        metas = [msgspec.json.decode(row["meta"]) for row in rows]
    assert [meta.get("truncations") for meta in metas] == [1, 2, 3, 4, 5, None]
    assert [meta.get("continues", False) for meta in metas] == [True] * 4 + [False] * 2
