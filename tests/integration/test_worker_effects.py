"""A worker whose session stays away stops its effects, and keeps what has already happened for the save.

Source: coordination §5, rules 1, 3 and 5.
"""

from __future__ import annotations

import asyncio

from omnara.domain.content import INTERRUPTED_TEXT, TextBlock
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.crashing import locked, step_states
from tests.support.engine import built_in, engine_on
from tests.support.waiting import until


def acting(call: ModelCall) -> Outcome:
    return ask(call, ("act", {})) if len(call.context.messages()) == 1 else say("done")


async def test_effects_stop_and_finished_results_are_still_saved(database: str) -> None:
    started: dict[str, asyncio.Event] = {}
    go: dict[str, asyncio.Event] = {}

    async def act(call: ToolCallRequest) -> ToolResult:
        started[str(call.agent_id)].set()
        await go[str(call.agent_id)].wait()
        return succeeded(TextBlock("happened"))

    with built_in("act", act):
        async with engine_on(database, acting) as engine:
            finished, running = await engine.add_agents(2, tools={"act": "always_allow"})
            for agent in (finished, running):
                started[str(agent)], go[str(agent)] = asyncio.Event(), asyncio.Event()
            [replica] = await engine.start(reconcile_s=0.2)
            for agent in (finished, running):
                await engine.say(agent)
                await started[str(agent)].wait()
            worker = replica.worker
            runs = {run.claim.agent_id: task for run, task in worker._runs}
            async with locked(engine, finished):
                go[str(finished)].set()
                entry = worker._runs.get(finished)
                assert entry is not None
                run = entry[0]
                await until(lambda: not run.effects, "the call is over, its save is not")
                worker.detached()
                replica.identity.last_renewal -= worker.deps.settings.worker_lease_s
                worker._loop_ran(0.0)
                await asyncio.wait([runs[running]], timeout=10)
                assert runs[running].cancelled()
                assert not runs[finished].done()
            worker.attached(replica.identity.worker_id, is_new=False)
            await engine.until_idle(finished, running)
            for agent, text in ((finished, "happened"), (running, INTERRUPTED_TEXT)):
                results = [payload for _, kind, payload in await engine.events(agent) if kind == "tool_result"]
                assert [result["content_blocks"][0]["text"] for result in results] == [text]
            assert await step_states(engine, finished) == ["succeeded"] * 3, "no step of it was given up"
            assert await step_states(engine, running) == ["succeeded", "released", "succeeded"]
