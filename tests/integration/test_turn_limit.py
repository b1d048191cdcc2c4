"""A turn that does not end by itself ends at a limit, whoever runs it; the next message starts afresh."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from omnara.domain.content import TextBlock
from omnara.engine.turn_limit import TURN_LIMIT_REACHED
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.engine import Engine, built_in, engine_on


async def look(_call: ToolCallRequest) -> ToolResult:
    return succeeded(TextBlock("looked"))


async def outputs(engine: Engine, agent: UUID) -> list[str]:
    return [
        payload["stop_reason"] for _, kind, payload in await engine.events(agent) if kind == "model_output"
    ]  # fmt: skip


async def ended_by_limit(engine: Engine, agent: UUID) -> Any:
    """The last event's error text; the turn is over, and nothing of it is left."""
    last = (await engine.events(agent))[-1][2]
    hot = await engine.hot(agent)
    assert (hot["turn_open"], hot["open_calls"], hot["attempt"], hot["retry_at"]) == (False, 0, 0, None)
    return last["content_blocks"][0]


async def test_a_model_that_asks_for_ever_is_stopped_and_the_next_message_starts_afresh(database: str) -> None:
    asked = 0

    def script(call: ModelCall) -> Outcome:
        nonlocal asked
        asked += 1
        return ask(call, ("look", {}))

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start(turn_max_model_calls=3)
            await engine.say(agent)
            await engine.until_idle(agent)
            assert asked == 3
            assert await outputs(engine, agent) == [*["tool_use"] * 3, "error"]
            block = await ended_by_limit(engine, agent)
            assert TURN_LIMIT_REACHED in str(block)
            await engine.say(agent, "again")
            await engine.until_idle(agent)
            assert asked == 6
            assert await outputs(engine, agent) == [*["tool_use"] * 3, "error"] * 2
            engine.script = lambda _: say("done")
            await engine.say(agent, "once more")
            await engine.until_idle(agent)
            assert (await outputs(engine, agent))[-1] == "end_turn"
            await engine.check()


async def test_a_turn_of_exactly_the_limit_ends_as_it_likes(database: str) -> None:
    asked = 0

    def script(call: ModelCall) -> Outcome:
        nonlocal asked
        asked += 1
        return ask(call, ("look", {})) if asked < 3 else say("done")

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.start(turn_max_model_calls=3)
            await engine.say(agent)
            await engine.until_idle(agent)
            assert await outputs(engine, agent) == ["tool_use", "tool_use", "end_turn"]


async def test_no_other_worker_forgets_the_count(database: str) -> None:
    """Each step is run by a process that knows nothing of the one before."""
    asked = 0

    def script(call: ModelCall) -> Outcome:
        nonlocal asked
        asked += 1
        return ask(call, ("look", {}))

    with built_in("look", look):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_allow"})
            await engine.say(agent)
            replicas = await engine.start(2, turn_max_model_calls=4, context_cache_bytes=0)
            for replica in replicas:
                replica.worker.must_yield = lambda claim: True  # type: ignore[method-assign]
            await engine.until_idle(agent)
            assert asked == 4
            assert TURN_LIMIT_REACHED in str(await ended_by_limit(engine, agent))
            await engine.check()
