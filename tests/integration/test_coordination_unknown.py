"""A save whose answer is lost is saved once, and its run goes on (rules D and E; coordination §5, rules 6 and 8).

Most tests here take the answer away from a save that has happened, that has not happened, or that is still happening
while the worker asks what became of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
import structlog

from omnara.db.advance import advance
from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.db.snapshot import read_for_step
from omnara.domain.advance import Advance, Advanced, ClaimLost
from omnara.domain.claim import Claim
from omnara.domain.content import TextBlock
from omnara.engine.model_step import Begun, Next, advance_for, begin_model
from omnara.ids import new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.worker import saver as saver_module
from omnara.worker.saver import Saver, judge
from tests.support.by_hand import PLAN, answer, begun_by_hand, hand_worker, take
from tests.support.crashing import append_notice, step_states, terminate
from tests.support.engine import Engine, built_in, engine_on
from tests.support.tcp_proxy import TcpProxy, proxied
from tests.support.waiting import until

Save = Callable[[Any, UUID, Sequence[Advance], float], Awaitable[dict[int, Advanced]]]


def two_turns(call: ModelCall) -> Outcome:
    return ask(call, ("count", {})) if len(call.context.messages()) == 1 else say("done")


class Counter:
    """A tool with an outside effect that is counted."""

    def __init__(self) -> None:
        self.hits = 0

    async def __call__(self, _call: ToolCallRequest) -> ToolResult:
        self.hits += 1
        return succeeded(TextBlock("counted"))


async def one_of_each(engine: Engine, agent: UUID, counter: Counter) -> None:
    """The agent's turn stands in the log exactly once."""
    kinds = [kind for _, kind, _ in await engine.events(agent)]
    assert kinds == ["agent_input", "agent_input", "model_output", "tool_result", "model_output"]
    assert await step_states(engine, agent) == ["succeeded"] * 3
    assert counter.hits == 1


@pytest.mark.parametrize("which", [1, 2, 3, 4])
@pytest.mark.parametrize("fate", ["committed", "never sent"])
async def test_the_answer_of_a_save_is_lost(
    database: str, monkeypatch: pytest.MonkeyPatch, which: int, fate: str
) -> None:
    """Begin, output with a call, result, last output: each in turn loses its answer, before or after the commit."""
    saves = 0
    real: Save = saver_module.advance

    async def losing(connection: Any, worker_id: UUID, items: Sequence[Advance], timeout_s: float) -> Any:
        nonlocal saves
        saves += 1
        if saves == which:
            if fate == "committed":
                await real(connection, worker_id, items, timeout_s)
            raise TimeoutError
        return await real(connection, worker_id, items, timeout_s)

    monkeypatch.setattr(saver_module, "advance", losing)
    counter = Counter()
    with built_in("count", counter):
        async with engine_on(database, two_turns) as engine:
            [agent] = await engine.add_agents(tools={"count": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            assert saves >= 4
            await one_of_each(engine, agent, counter)


@pytest.mark.parametrize("which", [2, 3])
async def test_a_save_that_arrives_after_it_was_given_up_is_not_repeated(
    database: str, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The first try is still in the server when the worker reads that nothing has happened; then it commits.

    The repeat carries the same claim, so the fence alone would let it write the same events once more.
    """
    saves = 0
    real: Save = saver_module.advance
    real_read = saver_module.read_claim
    late: list[tuple[asyncpg.Connection, asyncpg.transaction.Transaction]] = []

    async def stalling(connection: Any, worker_id: UUID, items: Sequence[Advance], timeout_s: float) -> Any:
        nonlocal saves
        saves += 1
        if saves == which:
            other = await connect(ConnectSettings(dsn=database), ConnKind.SAVER)
            transaction = other.transaction()
            await transaction.start()
            await real(other, worker_id, items, timeout_s)
            late.append((other, transaction))
            raise TimeoutError
        return await real(connection, worker_id, items, timeout_s)

    async def read(*args: Any, **named: Any) -> Any:
        state = await real_read(*args, **named)
        while late:
            other, transaction = late.pop()
            await transaction.commit()
            await other.close()
        return state

    monkeypatch.setattr(saver_module, "advance", stalling)
    monkeypatch.setattr(saver_module, "read_claim", read)
    counter = Counter()
    with built_in("count", counter):
        async with engine_on(database, two_turns) as engine:
            [agent] = await engine.add_agents(tools={"count": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            await one_of_each(engine, agent, counter)


async def test_a_kept_result_that_arrives_late_is_not_repeated(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above for the save of one result while another call of the step still runs: the claim is held, not moved."""
    gate = asyncio.Event()
    real: Save = saver_module.advance
    real_read = saver_module.read_claim
    late: list[tuple[asyncpg.Connection, asyncpg.transaction.Transaction]] = []
    stalled = False

    async def slow(_call: ToolCallRequest) -> ToolResult:
        await gate.wait()
        return succeeded(TextBlock("slow"))

    async def stalling(connection: Any, worker_id: UUID, items: Sequence[Advance], timeout_s: float) -> Any:
        nonlocal stalled
        if items[0].mode == "hold" and not stalled:
            stalled = True
            other = await connect(ConnectSettings(dsn=database), ConnKind.SAVER)
            transaction = other.transaction()
            await transaction.start()
            await real(other, worker_id, items, timeout_s)
            late.append((other, transaction))
            raise TimeoutError
        return await real(connection, worker_id, items, timeout_s)

    async def read(*args: Any, **named: Any) -> Any:
        state = await real_read(*args, **named)
        while late:
            other, transaction = late.pop()
            await transaction.commit()
            await other.close()
            gate.set()
        return state

    monkeypatch.setattr(saver_module, "advance", stalling)
    monkeypatch.setattr(saver_module, "read_claim", read)

    def script(call: ModelCall) -> Outcome:
        return ask(call, ("count", {}), ("slow", {})) if len(call.context.messages()) == 1 else say("done")

    counter = Counter()
    with built_in("count", counter), built_in("slow", slow):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"count": "always_allow", "slow": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            assert stalled
            assert [kind for _, kind, _ in await engine.events(agent)].count("tool_result") == 2


async def test_the_network_goes_silent_and_is_cut_during_saves(database: str) -> None:
    """Saves of 30 agents in flight; every connection of the worker but the script's is cut three times."""
    counter = Counter()
    async with proxied(database) as (proxy, dsn):
        with built_in("count", counter):
            async with engine_on(database, two_turns) as engine:
                agents = await engine.add_agents(30, tools={"count": "always_allow"})
                engine.dsn = dsn
                await engine.start(2)
                engine.dsn = database
                for agent in agents:
                    await engine.say(agent)
                await _trouble(engine, proxy)
                await engine.until_idle(*agents, limit_s=30)
                for agent in agents:
                    kinds = [kind for _, kind, _ in await engine.events(agent)]
                    assert kinds == ["agent_input", "agent_input", "model_output", "tool_result", "model_output"]
                rows = await engine.sql.fetch(
                    "select outcome, count(*) from tool_calls group by outcome order by outcome desc"
                )
                assert dict(rows).get("succeeded", 0) <= counter.hits <= 30


async def _trouble(engine: Engine, proxy: TcpProxy) -> None:
    for _ in range(3):
        before = await engine.sql.fetchval("select count(*) from events")
        proxy.go_silent()
        proxy.cut()
        proxy.flow()

        async def further(before: int = before) -> bool:
            done = await engine.sql.fetchval("select count(*) from agent_sched where worker_id is null") == 30
            return done or await engine.sql.fetchval("select count(*) from events") > before

        await until(further, "saves go on after the cut", limit_s=20)


async def test_saver_connections_are_terminated_again_and_again(database: str) -> None:
    counter = Counter()
    with built_in("count", counter):
        async with engine_on(database, two_turns) as engine:
            agents = await engine.add_agents(40, tools={"count": "always_allow"})
            await engine.start()
            for agent in agents:
                await engine.say(agent)
            cuts = 0

            async def idle() -> bool:
                nonlocal cuts
                cuts += await terminate(engine, "saver")
                return await engine.sql.fetchval(
                    "select count(*) from events where kind = 'model_output'"
                ) >= 80 or cuts >= 30

            await until(idle, "cut often", limit_s=20)
            await engine.until_idle(*agents)
            assert cuts > 0
            assert counter.hits == 40, "no call ran twice, and none was given up: the process lived"
            for agent in agents:
                assert await step_states(engine, agent) == ["succeeded"] * 3


async def test_a_cancelled_waiter_does_not_cancel_the_save(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        saver = Saver(ConnectSettings(dsn=database), max_waiting_bytes=10**6)
        worker_id = engine.replicas[0].identity.worker_id
        saver.serve(worker_id)
        engine.replicas[0].worker._claimer.pause()
        await engine.say(agent)
        claim = await take(engine, worker_id)
        waiter = asyncio.create_task(saver.save(advance_for(claim, Next("idle"))))
        await asyncio.sleep(0)
        waiter.cancel()
        serving = asyncio.create_task(saver.run())

        async def given_back() -> bool:
            return (await engine.hot(agent))["worker_id"] is None

        await until(given_back, "the save went through without its waiter")
        serving.cancel()
        await asyncio.wait([serving])
        engine.replicas[0].worker._claimer.resume(worker_id)
        await engine.sql.execute("update agent_sched set ready_at = now()")
        await engine.until_idle(agent)


async def test_judging_finds_the_event_of_an_admission_and_the_frontier_of_the_step(database: str) -> None:
    """A begin whose answer is lost: what it admitted stands where it stands, whatever was appended since."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        worker_id = await hand_worker(engine)
        await engine.say(agent)
        claim = await take(engine, worker_id)
        _, [item] = await read_for_step(engine.sql, agent, 1, 0)  # type: ignore[arg-type]
        begin = begin_model(claim, msgspec.structs.replace(PLAN, config_id=claim.config_id), (item,), 1)
        save = advance_for(claim, Next("model", begin))
        done = (await advance(engine.sql, worker_id, [save], 5))[0]  # type: ignore[arg-type]
        await append_notice(engine, agent)
        outcome = judge(save, await state_of(engine, save), worker_id)
        assert isinstance(outcome, Advanced)
        assert (outcome.begun, outcome.first_sequence, outcome.next_sequence) == (True, 2, 3)
        assert msgspec.structs.replace(outcome, saved_at=done.saved_at) == done
        assert judge(save, await state_of(engine, save), new_uuid()) != outcome
        await end(engine, agent, worker_id, claim, outcome, begin.call_id)


async def end(
    engine: Engine, agent: UUID, worker_id: UUID, claim: Claim, done: Advanced, call_id: UUID | None
) -> None:
    """Save an answer so that the agent is at rest."""
    claim.follow(done)
    assert call_id is not None
    assert done.turn_id is not None
    begun = Begun(call_id, done.turn_id, done.turn_sequence, done.step_number, 1, done.next_sequence - 1)
    assert await advance(engine.sql, worker_id, [answer(claim, begun)], 5)  # type: ignore[arg-type]


async def state_of(engine: Engine, save: Advance) -> Any:
    """What the saver reads to judge this save."""
    return await saver_module.read_claim(
        engine.sql,  # type: ignore[arg-type]
        save.agent_id,
        step_number=save.close.number if save.close else None,
        event_id=save.first_event,
        from_sequence=save.known_next_sequence,
    )


async def test_judging_says_lost_only_when_nothing_was_written(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        worker_id, claim, begun = await begun_by_hand(engine, agent)
        save = answer(claim, begun)
        assert judge(save, await state_of(engine, save), worker_id) is None, "not saved, still held: save again"
        assert isinstance(judge(save, await state_of(engine, save), new_uuid()), ClaimLost)
        await advance(engine.sql, worker_id, [save], 5)  # type: ignore[arg-type]
        outcome = judge(save, await state_of(engine, save), worker_id)
        assert isinstance(outcome, Advanced)
        assert (outcome.kept, outcome.first_sequence) == (False, 3)
        assert judge(save, None, worker_id) == ClaimLost()


async def test_a_repeat_of_a_save_writes_nothing(database: str) -> None:
    """The statement itself, sent twice as a repeat is: the row has moved since it was read."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        worker_id, claim, begun = await begun_by_hand(engine, agent)
        plan = msgspec.structs.replace(PLAN, config_id=claim.config_id)
        save = answer(claim, begun, following=Next("model", begin_model(claim, plan, (), 1)))
        hot = await engine.hot(agent)
        repeat = msgspec.structs.replace(save, seen=hot["next_sequence"])
        done = (await advance(engine.sql, worker_id, [save], 5))[0]  # type: ignore[arg-type]
        assert done.begun
        before = await engine.hot(agent)
        assert await advance(engine.sql, worker_id, [repeat], 5) == {}  # type: ignore[arg-type]
        assert await engine.hot(agent) == before
        assert save.begin is not None
        await end(engine, agent, worker_id, claim, done, save.begin.call_id)


async def test_a_full_disk_neither_spins_nor_fills_the_log(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report B55: each try is refused; the pauses double, and so do the lines that tell of it."""
    tries: list[float] = []
    real = saver_module.advance
    loop = asyncio.get_running_loop()

    async def full(*args: Any) -> dict[int, Advanced]:
        item = args[2][0]
        if item.close is not None and len(tries) < 8:
            tries.append(loop.time())
            raise asyncpg.DiskFullError("could not extend file")
        return await real(*args)

    monkeypatch.setattr(saver_module, "advance", full)
    with structlog.testing.capture_logs() as lines:
        async with engine_on(database, lambda _call: say("saved in the end")) as engine:
            [agent] = await engine.add_agents()
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            assert (await engine.events(agent))[-1][1] == "model_output"
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert all(pause >= 0.005 * 2**number for number, pause in enumerate(pauses, 1))
    told = [line["failures"] for line in lines if line["event"] == "save_outcome_unknown"]
    assert told == [1, 2, 4, 8]
