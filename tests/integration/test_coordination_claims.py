"""Claims: the scan is bounded, they are kept and given up by rule, suspects run alone (rules G, I, J; H: groups).

Source: coordination §3.2, §7, §10, §11.1.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any
from uuid import UUID

import asyncpg
import msgspec
import pytest

from omnara.db.advance import MAX_GROUP, MAX_GROUP_BYTES
from omnara.db.connection import ConnectSettings
from omnara.db.sched import (
    ALWAYS,
    CLAIM_IN_TURN,
    CLAIM_LONGEST,
    NO_PROJECT,
    claim_agents,
    oldest_waiter,
)
from omnara.db.sqlfiles import Queries
from omnara.domain.advance import Advance, Advanced, NewEvent
from omnara.domain.content import TextBlock
from omnara.ids import new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.worker import run as run_module
from omnara.worker import saver as saver_module
from omnara.worker.saver import DataRefused, Saver
from tests.support.by_hand import hand_worker
from tests.support.crashing import crash, until_worker_is
from tests.support.engine import Engine, built_in, engine_on
from tests.support.waiting import until


async def free(_call: ToolCallRequest) -> ToolResult:
    return succeeded(TextBlock("done"))


# --- G: the claim's own cost -------------------------------------------------------------------------------


async def plan_of(sql: asyncpg.Connection, text: str, types: str, *args: Any) -> str:
    """The generic plan of a query of the scheduler, the worst case of what a prepared statement may get."""
    async with sql.transaction():
        await sql.execute("set local plan_cache_mode = force_generic_plan")
        await sql.execute(f"prepare q ({types}) as {text}")
        values = ", ".join(f"'{value}'" for value in args)
        rows = await sql.fetch(f"explain (analyze, buffers, costs off) execute q ({values})")
        await sql.execute("deallocate q")
    return "\n".join(row[0] for row in rows)


def pages_of(plan: str) -> int:
    """How many pages a plan touched."""
    pages = next(line for line in plan.splitlines() if "Buffers" in line)
    return sum(int(part.split("=")[1]) for part in pages.split() if "=" in part)


async def test_tens_of_thousands_of_parked_agents_do_not_slow_the_claim(database: str) -> None:
    """The plan, not the time: the index with both bounds, few pages, no scan of the table, even as a generic plan."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [due] = await engine.add_agents()
        worker_id = await hand_worker(engine)
        await engine.sql.execute(
            """insert into agent_sched (agent_id, project_id, config_id, ready_at)
               select gen_random_uuid(), $1, $1, clock_timestamp() + interval '1 hour'
               from generate_series(1, 40000)""",
            engine.project_id,
        )
        await engine.sql.execute("vacuum analyze agent_sched")
        await engine.sql.execute("update agent_sched set ready_at = now() where agent_id = $1", due)
        types = "uuid, bigint, timestamptz, bigint, integer, boolean"
        plan = await plan_of(engine.sql, CLAIM_LONGEST, types, worker_id, 64, ALWAYS, 5, 8192, True)
        assert "Seq Scan on" not in plan
        scan = plan[plan.index("using agent_sched_ready") :]
        condition = next(line for line in scan.splitlines() if "Index Cond" in line)
        assert condition.count("ready_at") == 2, "a lower and an upper bound"
        assert "statement_timestamp()" in condition, "clock_timestamp() cannot bound a scan"
        assert pages_of(plan) < 100, plan
        assert (await engine.hot(due))["worker_id"] == worker_id
        text = Queries("sched")["oldest_waiter"]
        waiter = await plan_of(engine.sql, text, "float8, timestamptz", 0.25, ALWAYS)
        assert "using agent_sched_ready" in waiter
        assert "Seq Scan" not in waiter
        await engine.sql.execute("delete from agent_sched where agent_id <> $1", due)
        await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null, ready_at = null")


async def test_tens_of_thousands_of_ready_agents_do_not_slow_a_claim_in_turn(database: str) -> None:
    """From project to project along the index, whatever lies between them."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        worker_id = await hand_worker(engine)
        await engine.sql.execute(
            """insert into agent_sched (agent_id, project_id, config_id, ready_at)
               select gen_random_uuid(), case when n > 20 then $1 else gen_random_uuid() end, $1, clock_timestamp()
               from generate_series(1, 40000) n""",
            engine.project_id,
        )
        await engine.sql.execute("vacuum analyze agent_sched")
        types = "uuid, bigint, uuid, bigint, integer"
        plan = await plan_of(engine.sql, CLAIM_IN_TURN, types, worker_id, 42, NO_PROJECT, 5, 8192)
        assert "Seq Scan on" not in plan
        assert plan.count("agent_sched_project") >= 3, plan
        assert pages_of(plan) < 700, plan
        taken = await engine.sql.fetchval("select count(*) from agent_sched where worker_id is not null")
        assert taken == 22, "two of the large one, and the only one of each other"
        await engine.sql.execute("delete from agent_sched")


async def test_the_claim_tells_what_waits_and_the_last_event(database: str) -> None:
    """Up to two short inputs, steering first; more, or a long one, is left for the run to read."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        few, long, many, none = await engine.add_agents(4)
        worker_id = await hand_worker(engine)
        await engine.say(few, "later", wake=False)
        await engine.say(few, "now", mode="steering", wake=False)
        await engine.say(long, "x" * 200_000, wake=False)
        await engine.sql.execute("update inputs set content = $2::json where agent_id = $1", long, noise(100_000))
        for number in range(3):
            await engine.say(many, str(number), wake=False)
        await engine.sql.execute("update agent_sched set ready_at = now()")
        found = await claim_agents(engine.sql, worker_id, limit=9, since=ALWAYS, token=1, suspects=True)  # type: ignore[arg-type]
        claims = {claim.agent_id: claim for claim in found}
        told = claims[few].waiting
        assert told is not None
        assert [(item.delivery_mode, "now" in item.content) for item in told] == [("steering", True), ("queued", False)]
        assert (claims[long].waiting, claims[many].waiting, claims[none].waiting) == (None, None, ())
        last = "select id from events where agent_id = $1 order by sequence desc limit 1"
        assert claims[few].head_id == await engine.sql.fetchval(last, few)
        await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null, ready_at = null")
        await engine.sql.execute("delete from inputs where state = 'received'")


def noise(size: int) -> str:
    """JSON that no compression makes short."""
    return '[{"type":"text","text":"' + secrets.token_hex(size // 2) + '"}]'


async def test_a_warm_agent_answers_a_message_without_reading(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the claim tells suffices; only a log that somebody else has written to is read."""
    reads = 0
    real = run_module.read_situation

    async def counted(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        return await real(*args)

    monkeypatch.setattr(run_module, "read_situation", counted)
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        for number in range(4):
            await engine.say(agent, f"message {number}")
            await engine.until_idle(agent)
        assert reads == 1, "the first message finds a cold cache"
        assert [kind for _, kind, _ in await engine.events(agent)].count("model_output") == 4
        await engine.sql.execute(
            "update events set id = gen_random_uuid() where agent_id = $1 and sequence = "
            "(select max(sequence) from events where agent_id = $1)",
            agent,
        )
        await engine.say(agent, "after the tail was rewritten")
        await engine.until_idle(agent)
        assert reads == 2, "a tail that is not the remembered one is read"


async def test_the_claim_takes_the_oldest_within_its_bound_and_only_open_agents(database: str) -> None:
    async with engine_on(database, lambda _: say("hello")) as engine:
        agents = await engine.add_agents(5)
        worker_id = await hand_worker(engine)
        for number, agent in enumerate(agents):
            await engine.sql.execute(
                "update agent_sched set ready_at = now() - make_interval(secs => $2) where agent_id = $1",
                agent, 100.0 - number,
            )
        await engine.sql.execute("update agent_sched set gate = 'paused' where agent_id = $1", agents[1])
        await engine.sql.execute("update agent_sched set ready_at = now() + '1 h' where agent_id = $1", agents[2])
        since = await engine.sql.fetchval("select now() - interval '98.5 seconds'")
        bounded = await claim_agents(engine.sql, worker_id, limit=1, since=since, token=1, suspects=True)  # type: ignore[arg-type]
        assert [claim.agent_id for claim in bounded] == [agents[3]]
        rest = await claim_agents(engine.sql, worker_id, limit=9, since=ALWAYS, token=2, suspects=True)  # type: ignore[arg-type]
        assert [claim.agent_id for claim in sorted(rest, key=lambda claim: -claim.waited_s)] == [agents[0], agents[4]]
        assert await oldest_waiter(engine.sql, at_least_s=0.25, since=ALWAYS) is None  # type: ignore[arg-type]
        await engine.sql.execute("update agent_sched set worker_id = null, claim_token = null, ready_at = null")


async def test_an_agent_ready_before_the_bound_is_claimed_within_a_second(database: str) -> None:
    """The bounded scan passes over it; the full one, once a second, does not."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [first, old] = await engine.add_agents(2)
        await engine.start()
        await engine.say(first)
        await engine.until_idle(first)
        await engine.say(old, wake=False)
        await engine.sql.execute("update agent_sched set ready_at = now() - interval '1 hour' where agent_id = $1", old)
        await engine.until_idle(old, limit_s=20)
        assert len(await engine.events(old)) == 3


# --- I: kept claims ---------------------------------------------------------------------------------------


def forever(call: ModelCall) -> Outcome:
    """Ten tool calls, then an answer."""
    return ask(call, ("free", {})) if len(call.context.messages()) < 20 else say("done")


async def epochs(engine: Engine, agent: UUID) -> list[int]:
    rows = await engine.sql.fetch("select epoch from steps where agent_id = $1 order by number", agent)
    return [row[0] for row in rows]


async def test_a_claim_is_kept_while_nobody_waits(database: str) -> None:
    with built_in("free", free):
        async with engine_on(database, forever) as engine:
            [agent] = await engine.add_agents(tools={"free": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await engine.until_idle(agent)
            assert set(await epochs(engine, agent)) == {1}
            assert len(await epochs(engine, agent)) == 21


async def test_a_claim_is_given_up_after_so_many_steps(database: str) -> None:
    with built_in("free", free):
        async with engine_on(database, forever) as engine:
            [agent] = await engine.add_agents(tools={"free": "always_allow"})
            await engine.start(claim_max_steps=5)
            await engine.say(agent)
            await engine.until_idle(agent)
            seen = await epochs(engine, agent)
            assert [seen.count(epoch) for epoch in sorted(set(seen))] == [5, 5, 5, 5, 1]


async def test_a_kept_claim_yields_to_an_old_waiter(database: str) -> None:
    """One slot, one agent that could go on for long: the newcomer's wait is about the limit, not the whole run."""
    steps_until_newcomer = 0
    newcomer_done = asyncio.Event()

    def script(call: ModelCall) -> Outcome:
        nonlocal steps_until_newcomer
        if "newcomer" in str(call.context.tail()):
            newcomer_done.set()
            return say("done")
        if newcomer_done.is_set():
            return say("done")
        steps_until_newcomer += 1
        assert steps_until_newcomer < 5000, "the newcomer starves"
        return ask(call, ("free", {}))

    with built_in("free", free):
        async with engine_on(database, script) as engine:
            [busy] = await engine.add_agents(tools={"free": "always_allow"})
            [newcomer] = await engine.add_agents()
            await engine.start(worker_capacity=1, claim_yield_s=0.05, claim_max_steps=10**6)
            await engine.say(busy)
            await until(lambda: steps_until_newcomer > 3, "the busy one is under way")
            await engine.say(newcomer, "newcomer")
            async with asyncio.timeout(20):
                await newcomer_done.wait()
            await engine.until_idle(busy, newcomer)


# --- J: repeated crashes ----------------------------------------------------------------------------------


async def test_the_neighbours_of_a_poison_agent_are_not_blamed(database: str) -> None:
    """Soon after the poison agent's model is called, the worker dies, with all that runs in it at that moment.

    The others need longer than that, so each one that runs beside the poison agent dies with it.
    """
    struck = asyncio.Event()

    async def script(call: ModelCall) -> Outcome:
        if "poison" in str(call.context.tail()):
            await asyncio.sleep(0.1)
            struck.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0.2)
        return say("fine")

    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(7)
        poison = agents[3]
        for agent in agents:
            await engine.say(agent, "poison" if agent == poison else "go")
        worst = 0
        for _ in range(20):
            struck.clear()
            [replica] = await engine.start()
            done = asyncio.create_task(_at_rest(engine))
            hit = asyncio.create_task(struck.wait())
            await asyncio.wait([done, hit], return_when=asyncio.FIRST_COMPLETED, timeout=20)
            hit.cancel()
            if done.done():
                break
            done.cancel()
            await crash(replica)
            rows = await engine.sql.fetch("select agent_id, deaths from agent_sched")
            worst = max([worst, *(row["deaths"] for row in rows if row["agent_id"] != poison)])
        gates = {row[0]: row[1] for row in await engine.sql.fetch("select agent_id, gate from agent_sched")}
        assert gates.pop(poison) == "crashed"
        assert set(gates.values()) == {"open"}
        assert worst <= 2, "from the second death on it runs beside the innocent no more"
        assert await engine.sql.fetchval("select count(*) from events where kind = 'model_output'") == 6


async def _at_rest(engine: Engine) -> None:
    sql = await asyncpg.connect(engine.dsn)
    try:

        async def rest() -> bool:
            return not await sql.fetchval(
                """select count(*) from agent_sched
                   where worker_id is not null or (ready_at is not null and gate = 'open')"""
            )

        await until(rest, "everything is at rest", limit_s=30)
    finally:
        await sql.close()


async def test_a_process_runs_one_suspect_at_a_time(database: str) -> None:
    running: set[str] = set()
    most = 0
    gate = asyncio.Event()

    async def script(call: ModelCall) -> Outcome:
        nonlocal most
        text = str(call.context.tail())
        running.add(text)
        most = max(most, sum("suspect" in entry for entry in running))
        if "suspect" not in text:
            await gate.wait()
        await asyncio.sleep(0.03)  # long enough for the next claim to come
        running.discard(text)
        return say("ok")

    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(10)
        for number, agent in enumerate(agents):
            await engine.say(agent, f"{'suspect' if number < 6 else 'other'} {number}")
        await engine.sql.execute("update agent_sched set deaths = 2 where agent_id = any($1)", agents[:6])
        await engine.start()
        await engine.until_idle(*agents[:6])
        assert most == 1
        gate.set()
        await engine.until_idle(*agents)
        assert await engine.sql.fetchval("select sum(deaths) from agent_sched") == 0, "a finished step clears the count"


async def test_one_death_does_not_queue_its_agents_behind_each_other(database: str) -> None:
    """Who ran in a process that died goes on at once: to wait for the model calls of all others could take hours."""
    together = asyncio.Barrier(6)

    async def script(_call: ModelCall) -> Outcome:
        await together.wait()
        return say("ok")

    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(6)
        for agent in agents:
            await engine.say(agent)
        await engine.sql.execute("update agent_sched set deaths = 1")
        await engine.start()
        await engine.until_idle(*agents)


@pytest.mark.parametrize("end", ["stopped", "lapsed", "dead"])
async def test_only_a_death_counts(database: str, end: str) -> None:
    gate = asyncio.Event()
    calls = 0

    async def script(_call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        await gate.wait()
        return say("ok")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        await engine.say(agent)
        await until(lambda: calls == 1, "the model is being called")
        worker_id = replica.identity.worker_id
        await replica.sweep.stop()
        await engine.sql.execute(
            "update workers set state = $2, ended_at = clock_timestamp() where id = $1", worker_id, end
        )
        await crash(replica)
        await engine.start()
        await until(lambda: calls == 2, "the call is made again")
        assert (await engine.hot(agent))["deaths"] == (1 if end == "dead" else 0)
        await until_worker_is(engine, worker_id, end)
        gate.set()
        await engine.until_idle(agent)
        attempts = await engine.sql.fetch("select attempt, frontier from steps order by number")
        assert [tuple(row) for row in attempts] == [(1, 2), (1, 2)], "the same call, no attempt used up"


# --- H: groups --------------------------------------------------------------------------------------------


async def test_saves_go_in_groups_within_their_bounds(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever waits goes together, at most 32 agents and 1 MB, never two saves of one agent in a group."""
    groups: list[list[Advance]] = []
    go = asyncio.Event()

    async def record(_connection: Any, _worker_id: UUID, items: Any, _timeout_s: float) -> dict[int, Advanced]:
        await go.wait()
        groups.append(list(items))
        return {number: done(item) for number, item in enumerate(items)}

    monkeypatch.setattr(saver_module, "advance", record)
    saver = Saver(ConnectSettings(dsn=database), max_waiting_bytes=10**8)
    saver.serve(new_uuid())
    items = [save_of(new_uuid(), 10) for _ in range(70)] + [save_of(new_uuid(), 300_000) for _ in range(7)]
    twice = save_of(items[5].agent_id, 10)
    waiting = [asyncio.create_task(saver.save(item)) for item in [*items, twice]]
    serving = asyncio.create_task(saver.run())
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting)
    serving.cancel()
    await asyncio.wait([serving])
    assert sum(map(len, groups)) == 78
    assert max(map(len, groups)) == MAX_GROUP
    for group in groups:
        agents = [item.agent_id for item in group]
        assert agents == sorted(set(agents))
        assert len(group) == 1 or sum(item.size for item in group) <= MAX_GROUP_BYTES


def save_of(agent_id: UUID, size: int) -> Advance:
    event = NewEvent(new_uuid(), "model_output", new_uuid(), 1, "x" * size)
    return Advance(
        agent_id=agent_id, claim_token=1, epoch=1, gen=0, turn_id=None, turn_sequence=1, step_number=1,
        known_next_sequence=2, mode="release", events=(event,),
    )


def done(_item: Advance) -> Advanced:
    return Advanced(False, False, 2, 3, 0, None, 1, 1, None, False, None)  # type: ignore[arg-type]


async def test_one_bad_payload_saves_the_other_thirty(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that Postgres refuses, past every cleaning: its own turn ends with an error, its group is saved."""
    from omnara.worker import run as run_module

    real = run_module.accept_output
    go = asyncio.Event()
    calls = 0

    async def script(call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        await go.wait()
        return Completed("end_turn", (TextBlock("bad" if "bad" in str(call.context.tail()) else "good"),))

    def poisoned(*args: Any) -> Any:
        output = real(*args)
        event = output.events[0]
        if '"bad"' not in event.payload:
            return output
        return msgspec.structs.replace(output, events=(msgspec.structs.replace(event, payload='{"a":"\\ud800"'),))

    monkeypatch.setattr(run_module, "accept_output", poisoned)
    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(31)
        for number, agent in enumerate(agents):
            await engine.say(agent, "bad" if number == 7 else "good")
        await engine.start()
        await until(lambda: calls == 31, "all are in their model call")
        go.set()
        await engine.until_idle(*agents)
        reasons = [(await engine.events(agent))[-1][2]["stop_reason"] for agent in agents]
        assert reasons.count("end_turn") == 30
        assert reasons[7] == "error"


async def test_a_refused_save_says_so_and_a_full_queue_too(database: str) -> None:
    saver = Saver(ConnectSettings(dsn=database), max_waiting_bytes=1000)
    saver.serve(new_uuid())
    with pytest.raises(saver_module.SaverFull):
        await saver.save(save_of(new_uuid(), 2000))
    serving = asyncio.create_task(saver.run())
    bad = save_of(new_uuid(), 1)
    with pytest.raises(DataRefused):
        await saver.save(msgspec.structs.replace(bad, events=(msgspec.structs.replace(bad.events[0], payload="\x00"),)))
    assert await saver.save(save_of(new_uuid(), 3)) == saver_module.ClaimLost()
    serving.cancel()
    await asyncio.wait([serving])
