"""Cancel, archive, pause, resume and config changes against a running worker; drains and releases use nothing up.

Source: engine.md §8, §10; DESIGN §3 "Shutdown", "Crashes that repeat"; field-reports B40, B58.
"""

from __future__ import annotations

import asyncio
import random
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import INTERRUPTED_TEXT, TextBlock
from omnara.engine.cancel import cancel_agent
from omnara.engine.lifecycle import archive, pause
from omnara.engine.resume import resume
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Failed, ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.crashing import locked, owner, step_states
from tests.support.engine import Engine, built_in, engine_on
from tests.support.waiting import until


async def kinds(engine: Engine, agent: UUID) -> list[str]:
    """The log in short: inputs by their kind, outputs by their stop reason, results by their outcome."""
    short = []
    for _, kind, payload in await engine.events(agent):
        short.append(payload.get("input_kind") or payload.get("stop_reason") or payload.get("outcome") or kind)
    return short


async def test_cancel_around_the_completion_has_one_end(database: str) -> None:
    """Sixty agents, each cancelled 0 to 50 ms after its call began, when its model needs about 25 ms: one or the other.

    Twice in a row, and a message right after: it is always accepted and answered.
    """
    dice = random.Random(3)

    async def script(_call: ModelCall) -> Outcome:
        await asyncio.sleep(dice.uniform(0.015, 0.035))
        return say("done")

    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(60)
        [replica] = await engine.start()
        p = owner(engine)
        gate = asyncio.Semaphore(6)

        async def one(agent: UUID) -> None:
            async with gate:
                await engine_say(engine, agent)
                await asyncio.sleep(dice.uniform(0, 0.05))
                first = await cancel_agent(replica.deps, p, AgentPath(agent))
                again = await cancel_agent(replica.deps, p, AgentPath(agent))
                assert not (first.affected and again.affected)

        await asyncio.gather(*(one(agent) for agent in agents))
        await engine.until_idle(*agents)
        ends = [(await kinds(engine, agent))[2:] for agent in agents]
        # Cancelled before its message was admitted, an agent is idle: nothing is written, the message is answered.
        assert all(end in (["control"], ["end_turn"]) for end in ends), ends
        assert 0 < ends.count(["control"]) < 60, "the race was had both ways"
        for agent in agents:
            await engine.say(agent, "and now")
        await engine.until_idle(*agents)
        for agent in agents:
            assert (await kinds(engine, agent))[-2:] == ["content", "end_turn"]


async def engine_say(engine: Engine, agent: UUID) -> None:
    """As `say`, on a connection of its own: these run side by side."""
    async with locked(engine, agent) as connection:
        rank = await connection.fetchval(
            """update agent_sched set inputs_gen = inputs_gen + 1, next_rank = next_rank + 1024,
                      ready_at = least(ready_at, statement_timestamp())
               where agent_id = $1 returning next_rank - 1024""",
            agent,
        )
        await connection.execute(
            """insert into inputs (agent_id, id, kind, delivery_mode, state, rank, content)
               values ($1, $2, 'content', 'queued', 'received', $3, '[{"type":"text","text":"go"}]')""",
            agent, new_uuid(), rank,
        )
    engine.hints.ready([agent])


class Held:
    """A tool, or a model, that is under way until told; remembers whether it was cut short."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.go = asyncio.Event()
        self.cut = False

    async def tool(self, _call: ToolCallRequest) -> ToolResult:
        await self._hold()
        return succeeded(TextBlock("late"))

    async def model(self, _call: ModelCall) -> Outcome:
        await self._hold()
        return say("late")

    async def _hold(self) -> None:
        self.running.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cut = True
            raise


def acting(call: ModelCall) -> Outcome:
    return ask(call, ("act", {})) if len(call.context.messages()) == 1 else say("done")


@pytest.mark.parametrize("hinted", [True, False])
async def test_cancel_in_mid_tool_ends_it_and_its_late_result_is_ignored(database: str, hinted: bool) -> None:
    held = Held()
    with built_in("act", held.tool):
        async with engine_on(database, acting) as engine:
            [agent] = await engine.add_agents(tools={"act": "always_allow"})
            [replica] = await engine.start()
            await engine.say(agent)
            await held.running.wait()
            engine.hints.muted = not hinted
            done = await cancel_agent(replica.deps, owner(engine), AgentPath(agent))
            assert done.affected
            assert done.taken
            if hinted:
                await until(lambda: held.cut, "the tool is ended")
            else:
                held.go.set()
            await until(lambda: replica.worker.running == 0, "nothing runs")
            assert await kinds(engine, agent) == ["config_change", "content", "tool_use", "control", "canceled"]
            assert await step_states(engine, agent) == ["succeeded", "canceled"]
            engine.hints.muted = False
            await engine.say(agent, "go on")
            await engine.until_idle(agent)
            assert (await kinds(engine, agent))[-2:] == ["content", "end_turn"]


async def test_cancel_during_back_off_takes_effect_at_once(database: str) -> None:
    answers: list[Outcome] = [Failed(kind="rate_limit", message="later", status=429, retry_after_s=3600.0)]
    async with engine_on(database, lambda _: answers.pop(0)) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        await engine.say(agent, "first")

        async def parked() -> bool:
            return (await engine.hot(agent))["retry_at"] is not None

        await until(parked, "the retry is parked")
        hot = await engine.hot(agent)
        due_s = await engine.sql.fetchval("select extract(epoch from $1 - clock_timestamp())", hot["retry_at"])
        assert 3590 < due_s <= 3600
        assert hot["worker_id"] is None, "nobody is held by a wait"
        await engine.say(agent, "second")
        answers.append(say("ok"))
        assert (await cancel_agent(replica.deps, owner(engine), AgentPath(agent))).affected
        await engine.until_idle(agent)
        assert await kinds(engine, agent) == ["config_change", "content", "control", "content", "end_turn"]
        assert not (await cancel_agent(replica.deps, owner(engine), AgentPath(agent))).affected, "idle: writes nothing"
        assert len(await engine.events(agent)) == 5


@pytest.mark.parametrize("where", ["model", "tool"])
async def test_archive_in_mid_step_stops_first_and_writes_nothing_afterwards(database: str, where: str) -> None:
    held = Held()
    with built_in("act", held.tool):
        async with engine_on(database, held.model if where == "model" else acting) as engine:
            [agent] = await engine.add_agents(tools={"act": "always_allow"})
            [replica] = await engine.start()
            await engine.say(agent)
            await held.running.wait()
            await engine.say(agent, "waits")
            await archive(replica.deps, owner(engine), AgentPath(agent))
            before = await engine.events(agent)
            held.go.set()
            await until(lambda: replica.worker.running == 0, "nothing runs")
            assert await engine.events(agent) == before
            hot = await engine.hot(agent)
            assert (hot["gate"], hot["worker_id"], hot["turn_open"]) == ("archived", None, False)
            states = await engine.sql.fetch("select state from inputs where kind = 'content' order by rank")
            assert [row[0] for row in states] == ["resolved", "canceled"]


async def test_pause_in_each_state(database: str) -> None:
    """Running: the step is saved, then nothing is claimed. Parked, waiting, idle: what comes is kept for the resume."""
    held = Held()
    async with engine_on(database, held.model) as engine:
        [agent, idle] = await engine.add_agents(2)
        [replica] = await engine.start()
        p = owner(engine)
        await engine.say(agent)
        await held.running.wait()
        await engine.say(agent, "queued before the pause")
        await pause(replica.deps, p, AgentPath(agent))
        await pause(replica.deps, p, AgentPath(idle))
        held.go.set()
        await until(lambda: replica.worker.running == 0, "the step was saved")
        assert await kinds(engine, agent) == ["config_change", "content", "end_turn"]
        assert (await engine.hot(agent))["worker_id"] is None
        await engine.say(agent, "queued while paused")
        await engine.say(idle, "queued while paused")
        await engine.check()
        assert await step_states(engine, idle) == []
        for one in (agent, idle):
            await resume(replica.deps, p, AgentPath(one))
        await engine.until_idle(agent, idle)
        assert (await kinds(engine, agent)).count("end_turn") == 3
        assert (await kinds(engine, idle)).count("end_turn") == 1


async def test_pause_between_a_call_and_its_result(database: str) -> None:
    held = Held()
    with built_in("act", held.tool):
        async with engine_on(database, acting) as engine:
            [agent] = await engine.add_agents(tools={"act": "always_allow"})
            [replica] = await engine.start()
            await engine.say(agent)
            await held.running.wait()
            await pause(replica.deps, owner(engine), AgentPath(agent))
            held.go.set()
            await until(lambda: replica.worker.running == 0, "the result was saved")
            assert await kinds(engine, agent) == ["config_change", "content", "tool_use", "succeeded"]
            await resume(replica.deps, owner(engine), AgentPath(agent))
            await engine.until_idle(agent)
            assert (await kinds(engine, agent))[-1] == "end_turn"


async def change_config(engine: Engine, agent: UUID, instruction: str) -> None:
    """A config change as the API writes it: an event, the hot row's config, a fresh start of the pending call."""
    old = await engine.sql.fetchval("select definition from agent_configs limit 1")
    definition = msgspec.json.decode(old)
    definition["instruction"] = instruction
    config = new_uuid()
    await engine.sql.execute(
        """insert into agent_configs (id, org_id, project_id, source, source_format, source_hash, definition,
                                      definition_hash, instruction_hash, configured_model_id)
           select $1, org_id, project_id, 'y', 'yaml', $2, $3, $2, $2, configured_model_id
           from agent_configs limit 1""",
        config, str(config), msgspec.json.encode(definition).decode(),
    )
    payload = {
        "agent_input_id": "ain_y", "input_kind": "config_change", "content_blocks": [],
        "agent_config_id": encode(IdKind.AGENT_CONFIG, config),
    }
    async with locked(engine, agent) as connection:
        row = await connection.fetchrow(
            """update agent_sched set inputs_gen = inputs_gen + 1, next_sequence = next_sequence + 1, config_id = $2,
                      attempt = 0, retry_at = null,
                      ready_at = case when turn_open and open_calls = 0 then least(ready_at, statement_timestamp())
                                      else ready_at end
               where agent_id = $1 returning next_sequence - 1, turn_id, turn_sequence""",
            agent, config,
        )
        await connection.execute(
            """insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_semantic, payload)
               values ($1, $2, $3, 'agent_input', $4, $5, true, $6)""",
            agent, row[0], new_uuid(), row[1], row[2], msgspec.json.encode(payload).decode(),
        )
    engine.hints.ready([agent])


async def test_a_config_change_in_mid_turn_applies_to_the_next_call(database: str) -> None:
    held = Held()
    seen: list[str] = []

    def script(call: ModelCall) -> Outcome:
        seen.append(call.system)
        return ask(call, ("act", {})) if len(seen) == 1 else say("done")

    with built_in("act", held.tool):
        async with engine_on(database, script) as engine:
            [agent] = await engine.add_agents(tools={"act": "always_allow"})
            await engine.start()
            await engine.say(agent)
            await held.running.wait()
            await change_config(engine, agent, "New words.")
            held.go.set()
            await engine.until_idle(agent)
            assert seen == ["Do what you are told.", "New words."]
            configs = await engine.sql.fetch("select distinct config_id from steps")
            assert len(configs) == 2


async def test_a_config_change_supersedes_a_parked_retry(database: str) -> None:
    answers: list[Outcome] = [Failed(kind="rate_limit", message="later", status=429, retry_after_s=3600.0), say("ok")]
    seen: list[str] = []

    def script(call: ModelCall) -> Outcome:
        seen.append(call.system)
        return answers.pop(0)

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent)

        async def parked() -> bool:
            return (await engine.hot(agent))["retry_at"] is not None

        await until(parked, "the retry is parked")
        await change_config(engine, agent, "New words.")
        await engine.until_idle(agent)
        assert seen == ["Do what you are told.", "New words."]
        rows = await engine.sql.fetch("select attempt, frontier, state from steps order by number")
        assert [tuple(row) for row in rows] == [(1, 2, "failed"), (1, 3, "succeeded")]


async def test_a_config_change_during_a_failing_attempt_starts_afresh(database: str) -> None:
    """The failure of the old config's call neither delays the new one's nor counts against it."""
    calling, go = asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    async def script(call: ModelCall) -> Outcome:
        seen.append(call.system)
        if len(seen) > 1:
            return say("ok")
        calling.set()
        await go.wait()
        return Failed(kind="rate_limit", message="later", status=429, retry_after_s=3600.0)

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.start()
        await engine.say(agent)
        await calling.wait()
        await change_config(engine, agent, "New words.")
        go.set()
        await engine.until_idle(agent)
        assert seen == ["Do what you are told.", "New words."]
        rows = await engine.sql.fetch("select attempt, frontier, state from steps order by number")
        assert [tuple(row) for row in rows] == [(1, 2, "failed"), (1, 3, "succeeded")]


async def test_nine_drains_during_one_long_call_use_up_no_retry(database: str) -> None:
    held = Held()
    calls = 0

    async def script(call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return await held.model(call)

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        await engine.say(agent)
        for number in range(9):
            [replica] = await engine.start()
            await until(lambda number=number: calls == number + 1, "the call is made again")
            await replica.drain(0.0)
            assert (await engine.hot(agent))["worker_id"] is None
        held.go.set()
        await engine.start()
        await engine.until_idle(agent)
        rows = await engine.sql.fetch("select attempt, frontier, state from steps order by number")
        assert [tuple(row) for row in rows] == [(1, 2, "released")] * 9 + [(1, 2, "succeeded")]
        assert (await engine.hot(agent))["deaths"] == 0
        workers = await engine.sql.fetch("select state, count(*) from workers group by 1")
        assert {row[0]: row[1] for row in workers} == {"stopped": 9, "live": 1}


async def test_a_drain_saves_what_ends_in_time_and_hands_over_the_rest(database: str) -> None:
    quick, slow = Held(), Held()
    with built_in("quick", quick.tool), built_in("slow", slow.tool):

        def script(call: ModelCall) -> Outcome:
            if len(call.context.messages()) > 1:
                return say("done")
            return ask(call, ("quick" if "quick" in str(call.context.tail()) else "slow", {}))

        async with engine_on(database, script) as engine:
            tools = {"quick": "always_allow", "slow": "always_allow"}
            [one, two] = await engine.add_agents(2, tools=tools)
            [replica] = await engine.start()
            await engine.say(one, "quick")
            await engine.say(two, "slow")
            await quick.running.wait()
            await slow.running.wait()
            draining = asyncio.create_task(replica.drain(0.5))
            quick.go.set()
            await draining
            assert slow.cut
            assert await kinds(engine, one) == ["config_change", "content", "tool_use", "succeeded"]
            assert await kinds(engine, two) == ["config_change", "content", "tool_use", "failed"]
            assert (await engine.events(two))[-1][2]["content_blocks"][0]["text"] == INTERRUPTED_TEXT
            await engine.start()
            await engine.until_idle(one, two)
            assert (await kinds(engine, one))[-1] == (await kinds(engine, two))[-1] == "end_turn"


async def test_claims_that_only_the_database_knows_are_released(database: str) -> None:
    """The answer to a claim was lost: nobody runs the agent, yet a living worker holds it; the reconcile finds out."""
    async with engine_on(database, lambda _: say("hello")) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        replica.worker._claimer.pause()
        await engine.say(agent)
        await engine.sql.execute(
            """update agent_sched set worker_id = $1, claim_token = 4711, epoch = epoch + 1, ready_at = null""",
            replica.identity.worker_id,
        )
        replica.worker._claimer.resume(replica.identity.worker_id)
        await engine.until_idle(agent, limit_s=20)
        assert await kinds(engine, agent) == ["config_change", "content", "end_turn"]


async def test_a_new_claim_does_not_wait_for_the_old_call_of_the_same_agent(database: str) -> None:
    """The turn was cancelled and every hint lost; the same worker claims the agent again while the old call hangs."""
    held = Held()
    calls = 0

    async def script(call: ModelCall) -> Outcome:
        nonlocal calls
        calls += 1
        return await held.model(call) if calls == 1 else say("answered")

    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start(reconcile_s=60.0)
        await engine.say(agent)
        await held.running.wait()
        engine.hints.muted = True
        await cancel_agent(replica.deps, owner(engine), AgentPath(agent))
        await engine.say(agent, "again")
        await engine.until_idle(agent, limit_s=20)
        assert held.cut
        assert (await kinds(engine, agent))[-2:] == ["content", "end_turn"]


async def test_runs_whose_claim_is_gone_are_stopped(database: str) -> None:
    """All hints are lost: the model call of a cancelled turn is still ended by the reconcile, within two looks."""
    held = Held()
    async with engine_on(database, held.model) as engine:
        [agent] = await engine.add_agents()
        [replica] = await engine.start()
        await engine.say(agent)
        await held.running.wait()
        engine.hints.muted = True
        await cancel_agent(replica.deps, owner(engine), AgentPath(agent))
        await until(lambda: held.cut, "the call is ended", limit_s=20)
        await until(lambda: replica.worker.running == 0, "nothing runs")
