"""Nothing that a producer writes while a worker holds the agent is ever overlooked (rules E and P).

A worker relies on what it has read only as long as the generation that it has read still stands; it must never take
over a newer one without reading again. Source: coordination §2, §12.
"""

from __future__ import annotations

import asyncio

import pytest

from omnara.domain.content import TextBlock
from omnara.engine import results
from omnara.engine.scope import AgentPath
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.worker import memory as memory_module
from tests.support.crashing import append_notice, locked, owner
from tests.support.engine import Engine, built_in, engine_on
from tests.support.waiting import until


class Gate:
    """A tool that ends when told to."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, _call: ToolCallRequest) -> ToolResult:
        await self.open.wait()
        return succeeded(TextBlock("done"))


async def result_count(engine: Engine, count: int) -> None:
    async def there() -> bool:
        return await engine.sql.fetchval("select count(*) from events where kind = 'tool_result'") == count

    await until(there, f"{count} results are in the log")


def texts(call: ModelCall) -> list[str]:
    return [text for message in call.context.tail() for text in getattr(message, "texts", ())]


async def running(engine: Engine, count: int) -> None:
    async def there() -> bool:
        return await engine.sql.fetchval("select count(*) from tool_calls where state = 'running'") == count

    await until(there, f"{count} calls run")


@pytest.mark.parametrize("mode", ["steering", "queued"])
@pytest.mark.parametrize("when", ["during the model call", "between two results"])
async def test_a_message_in_mid_turn_is_never_overlooked(database: str, mode: str, when: str) -> None:
    """Steering joins the call after the batch, a queued message opens the turn after it; no hint is sent for either."""
    slow, quick = Gate(), Gate()
    answering = asyncio.Event()
    seen: list[list[str]] = []

    async def script(call: ModelCall) -> Outcome:
        seen.append(texts(call))
        await answering.wait()
        return ask(call, ("slow", {}), ("quick", {})) if len(seen) == 1 else say("done")

    with built_in("slow", slow), built_in("quick", quick):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"slow": "always_allow", "quick": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await until(lambda: len(seen) == 1, "the model was called")
            engine.hints.muted = True
            if when == "during the model call":
                await engine.say(agent, "more", mode=mode)
            answering.set()
            await running(engine, 2)
            if when == "between two results":
                await engine.say(agent, "more", mode=mode)
            quick.open.set()  # this save moves nothing but the result; the step goes on
            await result_count(engine, 1)
            slow.open.set()
            await engine.until_idle(agent)
            assert seen[1:] == ([["more"]] if mode == "steering" else [[], ["more"]])


async def test_a_custom_result_between_two_results_of_one_step_wakes_the_agent(database: str) -> None:
    slow, quick = Gate(), Gate()
    calls = 0

    def script(call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return ask(call, ("slow", {}), ("quick", {}), ("mine", {})) if calls == 1 else say("done")

    with built_in("slow", slow), built_in("quick", quick):
        async with engine_on(database, script) as engine:
            tools = dict.fromkeys(("slow", "quick", "mine"), "always_allow")
            [agent] = await engine.add_agents(tools=tools)
            [replica] = await engine.start()
            await engine.say(agent)
            await running(engine, 2)
            mine = await engine.sql.fetchval("select id from tool_calls where name = 'mine'")
            block = [TextBlock("from outside")]
            await results.submit_result(replica.deps, owner(engine), AgentPath(agent), mine, "succeeded", block)
            quick.open.set()
            await result_count(engine, 2)
            slow.open.set()
            await result_count(engine, 3)
            await engine.until_idle(agent)
            assert calls == 2


async def test_a_begun_model_step_sees_exactly_its_frontier(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of the API that lands between the begin and the reading of the log belongs to the next call."""
    reads = 0
    seen: list[tuple[int, list[str]]] = []
    read = memory_module.caught_up

    async def late(*args: object) -> object:
        nonlocal reads
        reads += 1
        if reads == 1:
            await append_notice(engine, agent)
        return await read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_module, "caught_up", late)
    # What was read with the situation is forgotten, so that the log is read when the step has begun.
    monkeypatch.setattr(memory_module.Memory, "absorb", lambda self, _rows: self.forget())

    def script(call: ModelCall) -> Outcome:
        seen.append((call.context.sequence, texts(call)))
        return say("ok")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "hi")
        await engine.until_idle(agent)
        await engine.say(agent, "more")
        await engine.until_idle(agent)
        frontiers = [row[0] for row in await engine.sql.fetch("select frontier from steps order by number")]
        assert frontiers == [2, 5]
        assert [sequence for sequence, _ in seen] == [2, 5]
        assert seen[0][1] == ["hi"]
        assert len(seen[1][1]) == 2  # the notice, then the message


async def test_a_message_committed_while_the_save_meets_its_lock_is_answered(database: str) -> None:
    """The save's snapshot is older than the message: only the row itself can tell. Hints are lost meanwhile."""
    gate = asyncio.Event()
    seen: list[list[str]] = []

    async def script(call: ModelCall) -> Outcome:
        seen.append(texts(call))
        if len(seen) == 1:
            await gate.wait()
        return say("ok")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent, "one")
        await until(lambda: len(seen) == 1, "the model was called")
        engine.hints.muted = True
        async with locked(engine, agent) as other:
            gate.set()
            await until(lambda: engine.replicas[0].worker.saver.waiting == 0, "the save is on its way")
            await other.execute(
                """update agent_sched set inputs_gen = inputs_gen + 1, next_rank = next_rank + 1024,
                          ready_at = least(ready_at, statement_timestamp()) where agent_id = $1""",
                agent,
            )
            await other.execute(
                """insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content)
                   values ($1, gen_random_uuid(), 'content', 'queued', 'received', 9999, $2)""",
                agent, '[{"type":"text","text":"two"}]',
            )
        await engine.until_idle(agent)
        assert seen == [["one"], ["two"]]
