"""The worker's steps on a real database: turns, tools, steering, retries, pauses, and what is in the log after each."""

from __future__ import annotations

import asyncio

import msgspec

from omnara.domain.content import TextBlock
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, Failed, ModelCall, Outcome, RequestedCall
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.engine import built_in, engine_on
from tests.support.waiting import until


def kinds(events: list[tuple[int, str, dict[str, object]]]) -> list[str]:
    return [kind for _, kind, _ in events]


async def test_a_message_is_answered(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "hi")
        await engine.until_idle(agent)
        events = await engine.events(agent)
        assert kinds(events) == ["agent_input", "agent_input", "model_output"]
        assert events[1][2]["content_blocks"] == [{"type": "text", "text": "hi"}]
        assert events[2][2]["stop_reason"] == "end_turn"
        hot = await engine.hot(agent)
        assert (hot["turn_open"], hot["turn_sequence"], hot["step_number"]) == (False, 2, 1)


async def test_queued_messages_get_one_turn_each_and_steering_goes_first(database: str) -> None:
    seen: list[list[str]] = []

    def script(call: ModelCall) -> Outcome:
        texts = [text for message in call.context.tail() for text in getattr(message, "texts", ())]
        seen.append(texts)
        return say("ok")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        for text in ("one", "two", "three"):
            await engine.say(agent, text)
        await engine.say(agent, "now", mode="steering")
        await engine.say(agent, "and now", mode="steering")
        await engine.start()
        await engine.until_idle(agent)
        assert seen == [["now", "and now"], ["one"], ["two"], ["three"]]
        assert (await engine.hot(agent))["turn_sequence"] == 5


async def test_tools_run_and_their_results_reach_the_model(database: str) -> None:
    ran: list[dict[str, object]] = []

    async def look(call: ToolCallRequest) -> ToolResult:
        ran.append(call.input)
        return succeeded(TextBlock(f"saw {call.input['n']}"))

    def script(call: ModelCall) -> Outcome:
        if len(call.context.messages()) == 1:
            return ask(call, ("look", {"n": 1}), ("look", {"n": 2}), ("gone", {}))
        results = call.context.tail()[0].results  # type: ignore[union-attr]
        return say(" / ".join(result.text for result in results))

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            events = await engine.events(agent)
    assert sorted(str(item) for item in ran) == ["{'n': 1}", "{'n': 2}"]
    assert kinds(events) == ["agent_input"] * 2 + ["model_output"] + ["tool_result"] * 3 + ["model_output"]
    answer = events[-1][2]["content_blocks"][0]["text"]
    assert answer.startswith("saw 1 / saw 2 / ")
    assert "no tool named" in answer


async def test_a_finished_call_is_saved_while_a_slow_one_runs(database: str) -> None:
    gate = asyncio.Event()

    async def slow(_call: ToolCallRequest) -> ToolResult:
        await gate.wait()
        return succeeded(TextBlock("slow"))

    async def quick(_call: ToolCallRequest) -> ToolResult:
        return succeeded(TextBlock("quick"))

    def script(call: ModelCall) -> Outcome:
        return ask(call, ("slow", {}), ("quick", {})) if len(call.context.messages()) == 1 else say("done")

    with built_in("slow", slow), built_in("quick", quick):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"slow": "always_allow", "quick": "always_allow"})
            await engine.start()
            await engine.say(agent)

            async def quick_saved() -> bool:
                return kinds(await engine.events(agent)).count("tool_result") == 1

            await until(quick_saved, "the quick result is in the log")
            assert (await engine.hot(agent))["open_calls"] == 1
            gate.set()
            await engine.until_idle(agent)
            events = await engine.events(agent)
    # The log has them as they ended; the model gets them in call order (see the tests of the conversation).
    texts = [payload["content_blocks"][0]["text"] for _, kind, payload in events if kind == "tool_result"]
    assert texts == ["quick", "slow"]


async def test_permission_modes(database: str) -> None:
    async def look(_call: ToolCallRequest) -> ToolResult:
        return succeeded(TextBlock("never"))

    def script(call: ModelCall) -> Outcome:
        if len(call.context.messages()) > 1:
            return say("done")
        return ask(call, ("look", {"a": 1}), ("deny_me", {}), ("mine", {}))

    with built_in("look", look), built_in("deny_me", look):
        async with engine_on(database, script) as engine:
            tools = {"look": "always_ask", "deny_me": "always_deny", "mine": "always_allow"}
            [agent] = await engine.add_agents(tools=tools)
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            rows = await engine.sql.fetch("select name, state, outcome from tool_calls order by ordinal")
            assert [tuple(row) for row in rows] == [
                ("look", "awaiting_permission", None),
                ("deny_me", "completed", "denied"),
                ("mine", "ready", None),
            ]
            [form] = await engine.sql.fetch("select kind, state, request from interactions")
            assert (form["kind"], form["state"]) == ("permission", "open")
            assert msgspec.json.decode(form["request"])["title"] == "Allow look?"
            hot = await engine.hot(agent)
            assert (hot["open_calls"], hot["worker_id"], hot["ready_at"]) == (2, None, None)


async def test_a_failing_model_is_tried_nine_times_then_the_turn_ends_with_the_error(database: str) -> None:
    calls = 0

    def script(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return Failed(kind="provider_unavailable", message="busy", status=503) if calls <= 9 else say("fine")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start(model_retry_base_s=0.001, model_retry_cap_s=0.005)
        await engine.say(agent)
        await engine.until_idle(agent)
        assert calls == 9
        events = await engine.events(agent)
        assert events[-1][2]["stop_reason"] == "error"
        assert events[-1][2]["content_blocks"] == [{"type": "error", "text": "busy"}]
        attempts = await engine.sql.fetch("select attempt, state from steps where agent_id = $1 order by number", agent)
        assert [tuple(row) for row in attempts] == [(number, "failed") for number in range(1, 10)]
        await engine.say(agent, "again")
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"


async def test_a_permanent_error_ends_the_turn_at_once(database: str) -> None:
    calls = 0

    def script(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return Failed(kind="auth", message="wrong key", status=401)

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        assert calls == 1
        assert (await engine.hot(agent))["turn_open"] is False


async def test_steering_supersedes_a_parked_retry_with_a_fresh_budget(database: str) -> None:
    answers: list[Outcome] = [Failed(kind="rate_limit", message="later", status=429, retry_after_s=3600.0), say("ok")]

    async with engine_on(database, lambda _: answers.pop(0)) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "first")

        async def parked() -> bool:
            hot = await engine.hot(agent)
            return hot["worker_id"] is None and hot["retry_at"] is not None

        await until(parked, "the retry is parked in the database")
        await engine.say(agent, "a queued message waits for the turn")
        await engine.say(agent, "steer", mode="steering")

        async def answered() -> bool:
            return "model_output" in kinds(await engine.events(agent))

        await until(answered, "steering is answered")
        attempts = await engine.sql.fetch("select attempt, state from steps where agent_id = $1 order by number", agent)
        assert [tuple(row) for row in attempts][:2] == [(1, "failed"), (1, "succeeded")]
        answers.append(say("and the queued one"))
        await engine.until_idle(agent)


async def test_a_call_with_unusable_arguments_fails_and_never_runs(database: str) -> None:
    async def look(_call: ToolCallRequest) -> ToolResult:
        raise AssertionError("must not run")

    def script(call: ModelCall) -> Outcome:
        if len(call.context.messages()) > 1:
            return say("done")
        call_id, public = call.new_call_id()
        broken = RequestedCall(call_id, public, "p1", "look", {}, problem="the arguments are not JSON")
        return Completed("tool_use", (broken,))

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            events = await engine.events(agent)
    result = events[3][2]
    assert (result["outcome"], result["content_blocks"][0]["value"]["error_code"]) == ("failed", "malformed")


async def test_bad_characters_are_stored_as_replacements(database: str) -> None:
    async def look(_call: ToolCallRequest) -> ToolResult:
        return succeeded(TextBlock("a\x00b\ud83d"))

    def script(call: ModelCall) -> Outcome:
        return ask(call, ("look", {"k\x00": "v\x00"})) if len(call.context.messages()) == 1 else say("done")

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            events = await engine.events(agent)
    assert events[2][2]["content_blocks"][0]["input"] == {"k\ufffd": "v\ufffd"}
    assert events[3][2]["content_blocks"] == [{"type": "text", "text": "a\ufffdb\ufffd"}]


async def test_a_fault_of_ours_spends_attempts_and_then_ends_the_turn(database: str) -> None:
    calls = 0

    def script(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        if calls <= 9:
            raise ZeroDivisionError("a bug")
        return say("mended")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start(model_retry_base_s=0.001, model_retry_cap_s=0.005)
        await engine.say(agent)
        await engine.until_idle(agent)
        assert calls == 9
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "error"
        await engine.say(agent, "again")
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"
