"""Rows that cannot be used stop their own agent, tell its reader, and leave the way on to an operator.

The rows stay where they are: exactly the damaged sequences are voided, an ordinary error output is appended, and
`resume` with force or restart goes on. Source: DESIGN §4; coordination §8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import INTERRUPTED_TEXT, TextBlock
from omnara.engine.resume import resume
from omnara.engine.scope import AgentPath
from omnara.errors import StateTransitionConflict
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, ModelCall, Outcome
from omnara.providers.replay import Replay, pack, unpack
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.worker.context_cache import CachedContext, ContextCache
from tests.support.by_hand import hand_worker, take
from tests.support.crashing import owner
from tests.support.engine import Engine, Replica, built_in, engine_on
from tests.support.waiting import until

Damage = Callable[[Engine, UUID], Awaitable[object]]


async def look(_call: ToolCallRequest) -> ToolResult:
    return succeeded(TextBlock("a page"))


def script(call: ModelCall) -> Outcome:
    """A tool call for every message that says so; the answer counts the messages of the request."""
    messages = call.context.messages()
    check_well_formed(call)
    last = call.context.tail()[-1]
    if "look" in str(last):
        return ask(call, ("look", {}))
    return say(f"{len(messages)} messages")


def check_well_formed(call: ModelCall) -> None:
    """Each call is answered once, in the very next message; roles take turns. Raises what fails the run."""
    open_calls: list[str] = []
    for message in call.context.messages():
        results = [result.tool_call_id for result in getattr(message, "results", ())]
        assert results == open_calls, (results, open_calls)
        open_calls = [block.tool_call_id for block in getattr(message, "calls", ())]
    assert open_calls == []


async def crashed(engine: Engine, agent: UUID) -> str:
    """Wait for the quarantine; returns the text that the reader sees."""

    async def there() -> bool:
        return (await engine.hot(agent))["gate"] == "crashed"

    await until(there, "the agent is crashed")
    hot = await engine.hot(agent)
    assert hot["worker_id"] is None
    sequence, kind, payload = await last_event(engine, agent)
    assert kind == "model_output"
    assert payload["stop_reason"] == "error"
    [block] = payload["content_blocks"]
    assert block["type"] == "error"
    assert sequence == hot["next_sequence"] - 1
    return str(block["text"])


async def last_event(engine: Engine, agent: UUID) -> tuple[int, str, dict[str, Any]]:
    """The newest event; the ones before it may not decode."""
    row = await engine.sql.fetchrow(
        "select sequence, kind, payload from events where agent_id = $1 order by sequence desc limit 1", agent
    )
    return row[0], row[1], msgspec.json.decode(row[2])


async def one_turn_with_a_tool(engine: Engine) -> tuple[UUID, UUID]:
    """Two agents, each with a finished turn: config, message, call, result, answer."""
    agent, other = await engine.add_agents(2, tools={"look": "always_allow"})
    await engine.start()
    for one in (agent, other):
        await engine.say(one, "look")
    await engine.until_idle(agent, other)
    kinds = [kind for _, kind, _ in await engine.events(agent)]
    assert kinds == ["agent_input", "agent_input", "model_output", "tool_result", "model_output"]
    return agent, other


def payload(sequence: int, text: str) -> Damage:
    async def damage(engine: Engine, agent: UUID) -> object:
        return await engine.sql.execute(
            "update events set payload = $3 where agent_id = $1 and sequence = $2", agent, sequence, text
        )

    return damage


def meta(sequence: int) -> Damage:
    async def damage(engine: Engine, agent: UUID) -> object:
        return await engine.sql.execute(
            "update events set meta = '[]' where agent_id = $1 and sequence = $2", agent, sequence
        )

    return damage


DAMAGES: dict[str, tuple[Damage, set[int]]] = {
    "message": (payload(2, '{"agent_input_id": 7}'), {2}),
    "output with the call": (payload(3, "[]"), {3}),
    "meta of that output": (meta(3), {3}),
    "result": (payload(4, '{"tool_call_id": "tcl_x"}'), {4}),
    "answer": (payload(5, '"text"'), {5}),
}


def sequences(void: object) -> set[int]:
    return {number for part in void for number in range(part.lower, part.upper)}  # type: ignore[attr-defined]


def cold(replica: Replica) -> None:
    """Forget what the worker has folded, as another replica would not know it."""
    replica.worker.cache = ContextCache(10**6)


@pytest.mark.parametrize("way", ["force", "restart"])
@pytest.mark.parametrize("which", DAMAGES)
async def test_a_damaged_event(database: str, which: str, way: str) -> None:
    damage, expected = DAMAGES[which]
    with built_in("look", look):
        async with engine_on(database, script) as engine:
            agent, other = await one_turn_with_a_tool(engine)
            [replica] = engine.replicas
            await damage(engine, agent)
            cold(replica)
            await engine.say(agent, "more")
            await engine.say(other, "more")
            text = await crashed(engine, agent)
            assert f"event {min(expected)} is damaged" in text
            assert "force or restart" in text
            hot = await engine.hot(agent)
            assert sequences(hot["void"]) == expected
            assert hot["history_version"] == 1
            await engine.until_idle(other)
            assert (await engine.events(other))[-1][2]["stop_reason"] == "end_turn"

            p = owner(engine)
            with pytest.raises(StateTransitionConflict, match="damaged"):
                await resume(replica.deps, p, AgentPath(agent))
            await resume(replica.deps, p, AgentPath(agent), force=way == "force", restart=way == "restart")
            await engine.until_idle(agent)
            hot = await engine.hot(agent)
            assert hot["gate"] == "open"
            assert hot["turn_open"] is False
            assert (await last_event(engine, agent))[2]["stop_reason"] == "end_turn"
            await engine.say(agent, "and on")
            await engine.until_idle(agent)
            assert (await engine.hot(agent))["gate"] == "open"


async def test_two_damaged_events_void_exactly_themselves(database: str) -> None:
    with built_in("look", look):
        async with engine_on(database, script) as engine:
            agent, _ = await one_turn_with_a_tool(engine)
            await payload(2, "{}")(engine, agent)
            await payload(5, "{}")(engine, agent)
            cold(engine.replicas[0])
            await engine.say(agent, "more")
            await crashed(engine, agent)
            assert sequences((await engine.hot(agent))["void"]) == {2, 5}


async def test_missing_rows_in_the_middle_and_at_the_end(database: str) -> None:
    """Rows that are gone cannot be voided where they stand, but the agent stops the same way and can be forced on."""
    with built_in("look", look):
        async with engine_on(database, script) as engine:
            agent, _ = await one_turn_with_a_tool(engine)
            [replica] = engine.replicas
            await engine.say(agent, "more", wake=False)
            await engine.until_idle(agent)
            await engine.sql.execute("create table gone as select * from events")
            await engine.sql.execute("delete from events where agent_id = $1 and sequence in (3, 4)", agent)
            cold(replica)
            await engine.say(agent, "once more")
            await crashed(engine, agent)
            assert sequences((await engine.hot(agent))["void"]) == {3, 4}
            await resume(replica.deps, owner(engine), AgentPath(agent), force=True)
            await engine.until_idle(agent)
            assert (await engine.hot(agent))["gate"] == "open"
            # For the checks at the end: the log is whole again.
            await engine.sql.execute(
                "insert into events select * from gone where sequence in (3, 4) and agent_id = $1", agent
            )


async def test_a_row_that_is_gone_at_the_frontier(database: str) -> None:
    with built_in("look", look):
        async with engine_on(database, script) as engine:
            agent, _ = await one_turn_with_a_tool(engine)
            [replica] = engine.replicas
            worker = replica.worker
            hidden = await engine.sql.fetchrow("select * from events where agent_id = $1 and sequence = 5", agent)
            await engine.sql.execute("delete from events where agent_id = $1 and sequence = 5", agent)
            cold(replica)
            await engine.say(agent, "more")
            text = await crashed(engine, agent)
            assert "event 5" in text
            assert worker.running == 0
            await engine.sql.execute("insert into events select ($1::events).*", hidden)


async def test_a_damaged_replay(database: str) -> None:
    """Provider content that fails its checksum: the event that carries it is voided, and the agent stopped."""
    calls = 0

    def replaying(call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        for message in call.context.settled:
            blob = getattr(message, "replay", None)
            if blob is not None:
                unpack(blob, message.sequence, calls=0)  # what a renderer does before it sends
        return Completed("end_turn", (TextBlock("hello"),), replay=pack(Replay("openai_chat_completions")))

    async with engine_on(database, replaying) as engine:
        agent, other = await engine.add_agents(2)
        [replica] = await engine.start()
        for one in (agent, other):
            await engine.say(one, "hi")
        await engine.until_idle(agent, other)
        await engine.sql.execute(
            """update events set replay = set_byte(replay, length(replay) - 1, get_byte(replay, length(replay) - 1) # 1)
               where agent_id = $1 and sequence = 3""",
            agent,
        )
        cold(replica)
        for one in (agent, other):
            await engine.say(one, "again")
        assert "checksum" in await crashed(engine, agent)
        assert sequences((await engine.hot(agent))["void"]) == {3}
        await engine.until_idle(other)
        assert (await engine.hot(other))["gate"] == "open"
        await resume(replica.deps, owner(engine), AgentPath(agent), force=True)
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"


async def test_a_damaged_step_row(database: str) -> None:
    """The number of the next step is taken by a row that should not be there: stopped, not tried for ever."""
    with built_in("look", look):
        async with engine_on(database, script) as engine:
            agent, other = await one_turn_with_a_tool(engine)
            [replica] = engine.replicas
            await engine.sql.execute("update steps set number = 4 where agent_id = $1 and number = 3", agent)
            for one in (agent, other):
                await engine.say(one, "more")
            assert "steps_pkey" in await crashed(engine, agent)
            await engine.until_idle(other)
            assert (await engine.events(other))[-1][2]["stop_reason"] == "end_turn"
            await engine.sql.execute("update steps set number = 3 where agent_id = $1 and number = 4", agent)
            await resume(replica.deps, owner(engine), AgentPath(agent), force=True)
            await engine.until_idle(agent)
            assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"


async def test_a_damaged_step_row_under_a_running_step(database: str) -> None:
    """The started step's row is gone: what the model answers is saved all the same."""
    go = asyncio.Event()

    async def waiting(_call: ModelCall) -> Outcome:
        await go.wait()
        return say("hello")

    async with engine_on(database, waiting) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent)

        async def begun() -> bool:
            return bool(await engine.sql.fetchval("select count(*) from steps"))

        await until(begun, "the step is begun")
        await engine.sql.execute("delete from steps where agent_id = $1", agent)
        go.set()
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["stop_reason"] == "end_turn"


async def test_a_damaged_call_of_the_open_batch(database: str) -> None:
    """The input of a call that is to run is not an object: nothing runs, the agent is stopped."""
    ran = 0

    async def counted(_call: ToolCallRequest) -> ToolResult:
        nonlocal ran
        ran += 1
        return succeeded(TextBlock("x"))

    with built_in("look", counted):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"look": "always_ask"})
            [replica] = await engine.start()
            await engine.say(agent, "look")
            await engine.until_idle(agent)
            await engine.sql.execute("update tool_calls set input = '[1]', state = 'ready'")
            await engine.sql.execute("update interactions set state = 'resolved'")
            await engine.sql.execute(
                "update agent_sched set ready_at = now(), inputs_gen = inputs_gen + 1 where agent_id = $1", agent
            )
            engine.hints.ready([agent])
            await crashed(engine, agent)
            assert ran == 0
            await resume(replica.deps, owner(engine), AgentPath(agent), restart=True)
            await engine.until_idle(agent)
            assert (await engine.hot(agent))["gate"] == "open"


# --- O: what is remembered between steps is never trusted blindly -----------------------------------------


async def test_a_rewritten_tail_is_noticed(database: str) -> None:
    """As after a failover: the last event that a worker remembers has another id in the log."""
    seen: list[str] = []

    def remember(call: ModelCall) -> Outcome:
        seen.append(str(call.context.messages()))
        return say(f"answer {len(seen)}")

    async with engine_on(database, remember) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        await engine.say(agent, "first")
        await engine.until_idle(agent)
        await engine.sql.execute(
            """update events set id = gen_random_uuid(),
                                 payload = replace(payload::text, 'answer 1', 'other words')::json
               where agent_id = $1 and sequence = 3""",
            agent,
        )
        await engine.say(agent, "second")
        await engine.until_idle(agent)
        assert "other words" in seen[1]
        assert "answer 1" not in seen[1]
        assert replica.worker.cache.hits >= 1, "it was remembered, and found stale"


async def test_the_log_is_read_from_the_last_known_event_on(database: str) -> None:
    """Inclusive: with nothing new, one row comes back and says that the memory still stands."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        engine.replicas[0].worker._claimer.pause()
        worker_id = await hand_worker(engine)
        await engine.say(agent, "more")
        claim = await take(engine, worker_id)
        entry = CachedContext(claim)
        assert await entry.catch_up(engine.sql, agent, 3)  # type: ignore[arg-type]
        assert (entry.sequence, len(entry.context.messages())) == (3, 3)
        assert await entry.catch_up(engine.sql, agent, 3)  # type: ignore[arg-type]
        assert entry.sequence == 3
        # The log is shorter than what is remembered: commits were lost.
        assert not await entry.catch_up(engine.sql, agent, 2)  # type: ignore[arg-type]
        await engine.sql.execute("update events set id = gen_random_uuid() where sequence = 3")
        assert not await entry.catch_up(engine.sql, agent, 3)  # type: ignore[arg-type]
        await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null, ready_at = now()")
        engine.replicas[0].worker._claimer.resume(engine.replicas[0].identity.worker_id)
        await engine.until_idle(agent)


async def test_a_long_log_is_read_in_pages(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from omnara.worker import context_cache

    monkeypatch.setattr(context_cache, "EVENT_PAGE", 3)
    seen: list[int] = []

    def count(call: ModelCall) -> Outcome:
        seen.append(len(call.context.messages()))
        return say("ok")

    async with engine_on(database, count) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        for number in range(8):
            cold(replica)
            await engine.say(agent, str(number))
            await engine.until_idle(agent)
        assert seen == [1, 3, 5, 7, 9, 11, 13, 15]


async def test_an_interrupted_result_is_told_in_exactly_these_words() -> None:
    assert INTERRUPTED_TEXT == "Tool call was interrupted; its external outcome is unknown."
