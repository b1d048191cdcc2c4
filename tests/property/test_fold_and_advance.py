"""Random histories through the real engine: the log and the hot row always say the same, every invariant holds.

One agent, a model that draws what it answers, and an adversary that draws messages, cancels, pauses, config changes,
results from outside and worker deaths, each at whatever moment the event loop happens to be at. In a snapshot taken at
any time the fold of the log equals the columns of the hot row; at the end all checks are empty and each call has one
result. Source: DESIGN §2, §4.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnara.db import snapshot
from omnara.domain.content import TextBlock
from omnara.domain.state import fold
from omnara.engine.cancel import cancel_agent
from omnara.engine.inputs import create_input
from omnara.engine.interactions import resolve
from omnara.engine.lifecycle import pause
from omnara.engine.results import submit_result
from omnara.engine.resume import resume
from omnara.engine.scope import AgentPath
from omnara.errors import Conflict, StateTransitionConflict
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Failed, ModelCall, Outcome
from omnara.tools.interactions import Answer
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.crashing import append_notice, crash, owner
from tests.support.engine import Engine, built_in, engine_on
from tests.support.waiting import until

OPERATIONS = ("queued", "steering", "cancel", "pause", "resume", "notice", "result", "answer", "crash", "look", "wait")
TOOLS = {"act": "always_allow", "mine": "always_allow", "asked": "always_ask", "never": "always_deny"}


class Adversary:
    """Draws the model's answers and carries out the operations."""

    def __init__(self, engine: Engine, agent: UUID, dice: random.Random) -> None:
        self.engine = engine
        self.agent = agent
        self.path = AgentPath(agent)
        self.p = owner(engine)
        self.dice = dice
        self.quiet = False

    async def model(self, call: ModelCall) -> Outcome:
        """Answer, ask for some tools, or fail."""
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        drawn = self.dice.randrange(10)
        if self.quiet or drawn < 4:
            return say("done")
        if drawn < 8:
            names = self.dice.sample(sorted(TOOLS), self.dice.randrange(1, 5))
            return ask(call, *((name, {}) for name in names))
        if drawn == 8:
            return Failed(kind="provider_unavailable", message="busy", status=503)
        return Failed(kind="invalid_request", message="refused", status=400)

    async def tool(self, _call: ToolCallRequest) -> ToolResult:
        """An effect that takes a few turns of the loop."""
        for _ in range(self.dice.randrange(6)):
            await asyncio.sleep(0)
        return succeeded(TextBlock("done"))

    async def do(self, operation: str) -> None:
        """Carry out one operation, as the API or a misfortune would."""
        deps = self.engine.replicas[-1].deps
        if operation in ("queued", "steering"):
            await create_input(deps, self.p, self.path, [TextBlock("go")], mode=operation)  # type: ignore[arg-type]
        elif operation == "cancel":
            await cancel_agent(deps, self.p, self.path)
        elif operation == "pause":
            await pause(deps, self.p, self.path)
        elif operation == "resume":
            await resume(deps, self.p, self.path)
        elif operation == "notice":
            await append_notice(self.engine, self.agent)
        elif operation == "result":
            await self.submit()
        elif operation == "answer":
            await self.answer()
        elif operation == "crash":
            await crash(self.engine.replicas[-1])
            await self.engine.start()
        elif operation == "look":
            await assert_folded(self.engine, self.agent)
        else:
            await asyncio.sleep(self.dice.uniform(0, 0.02))

    async def submit(self) -> bool:
        """Post the result of a ready custom call, if there is one; whether there was."""
        call = await self.engine.sql.fetchval(
            "select id from tool_calls where agent_id = $1 and type = 'custom' and state = 'ready' limit 1", self.agent
        )
        if call is None:
            return False
        deps = self.engine.replicas[-1].deps
        try:
            await submit_result(deps, self.p, self.path, call, "succeeded", [TextBlock("mine")])
        except Conflict:
            return False  # somebody took the call away after it was looked for
        return True

    async def answer(self) -> bool:
        """Answer an open form, yes or no; whether there was one."""
        form = await self.engine.sql.fetchval(
            "select id from interactions where agent_id = $1 and state = 'open' limit 1", self.agent
        )
        if form is None:
            return False
        deps = self.engine.replicas[-1].deps
        try:
            await resolve(deps, self.p, self.path, form, [Answer((self.dice.randrange(2),), None)])
        except Conflict:
            return False
        return True

    async def settle(self) -> None:
        """Let the agent come to rest: the model only answers now, every call and form is served."""
        self.quiet = True
        try:
            await resume(self.engine.replicas[-1].deps, self.p, self.path)
        except StateTransitionConflict:
            await resume(self.engine.replicas[-1].deps, self.p, self.path, force=True)

        async def at_rest() -> bool:
            while await self.submit() or await self.answer():
                pass
            return bool(
                await self.engine.sql.fetchval(
                    """select worker_id is null and ready_at is null and open_calls = 0 and not turn_open
                       from agent_sched where agent_id = $1""",
                    self.agent,
                )
            )

        await until(at_rest, "the agent is at rest", limit_s=20)


async def assert_folded(engine: Engine, agent: UUID) -> None:
    """In one snapshot the fold of the log equals the hot row's columns, and open calls are those of the fold."""
    sql = await asyncpg.connect(engine.dsn)
    try:
        async with sql.transaction(isolation="repeatable_read", readonly=True):
            hot = await sql.fetchrow("select * from agent_sched where agent_id = $1", agent)
            rows = await snapshot.read_events(sql, agent, 1)  # type: ignore[arg-type]
            calls = await sql.fetch("select state, result_sequence from tool_calls where agent_id = $1", agent)
    finally:
        await sql.close()
    assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
    state = fold(snapshot.decode_event(row) for row in rows if not any(row["sequence"] in part for part in hot["void"]))
    folded = (state.sequence + 1, state.turn_id, state.turn_sequence, state.batch_sequence, len(state.open_calls))
    columns = ("next_sequence", "turn_id", "turn_sequence", "batch_sequence", "open_calls")
    assert folded == tuple(hot[name] for name in columns)
    assert state.turn_open == hot["turn_open"]
    results = [call["result_sequence"] for call in calls if call["state"] == "completed"]
    assert len(set(results)) == len(results)
    assert len(calls) - len(results) == hot["open_calls"]


@pytest.mark.timeout(110)
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=8, max_size=25),
    seed=st.integers(0, 2**32),
)
async def test_any_interleaving_keeps_log_and_hot_row_in_step(database: str, operations: list[str], seed: int) -> None:
    dice = random.Random(seed)
    adversaries: list[Adversary] = []

    async def script(call: ModelCall) -> Outcome:
        return await adversaries[0].model(call)

    async def act(call: ToolCallRequest) -> ToolResult:
        return await adversaries[0].tool(call)

    with built_in("act", act), built_in("asked", act), built_in("never", act):
        async with engine_on(database, script) as engine:
            engine.settings = _quick(engine.settings)
            [agent] = await engine.add_agents(tools=TOOLS)
            await engine.start()
            adversary = Adversary(engine, agent, dice)
            adversaries.append(adversary)
            await adversary.do("queued")
            for operation in operations:
                for _ in range(dice.randrange(3)):
                    await asyncio.sleep(0.001)
                await adversary.do(operation)
            await adversary.settle()
            await assert_folded(engine, agent)
            waiting = await engine.sql.fetchval(
                "select count(*) from inputs where agent_id = $1 and state = 'received'", agent
            )
            assert waiting == 0, "every message was answered or canceled"


def _quick(base: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(base, model_retry_base_s=0.001, model_retry_cap_s=0.005, death_grace_s=0.05)
