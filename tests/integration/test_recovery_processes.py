"""Real processes that are killed with -9 or stopped for longer than their lease, at every point of a step.

Whatever the point: another worker goes on, a tool's effect happens at most once, a started call that was not saved is
told as interrupted, a model call is made again with the same frontier and attempt. Source: issue of the engine, DESIGN
§2 (invariant 4); field-reports B01, B07, B08.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.domain.content import INTERRUPTED_TEXT, TextBlock
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.support.crashing import until_worker_is
from tests.support.engine import Engine, built_in, engine_on
from tests.support.waiting import until
from tests.support.worker_process import Orders, note


class Files:
    """What a worker process leaves behind."""

    def __init__(self, root: Path) -> None:
        self.points = root / "points"
        self.effects = root / "effects"
        self.go = root / "go"

    def reached(self, name: str) -> list[dict[str, Any]]:
        """The points of this name that were reached so far."""
        if not self.points.exists():
            return []
        lines = [msgspec.json.decode(line) for line in self.points.read_bytes().splitlines()]
        return [line for line in lines if line["point"] == name]

    @property
    def hits(self) -> int:
        """How often the tool had its effect, in whatever process."""
        return len(self.effects.read_text().splitlines()) if self.effects.exists() else 0


@contextlib.asynccontextmanager
async def process(engine: Engine, files: Files, **orders: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process on the engine's database; it is ended when the test leaves."""
    text = msgspec.json.encode(
        Orders(dsn=engine.dsn, points=str(files.points), effects=str(files.effects), go=str(files.go), **orders)
    ).decode()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.worker_process", text, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def script(call: ModelCall) -> Outcome:
    return ask(call, ("count", {})) if len(call.context.messages()) == 1 else say("done")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """The files of one test, and the tool in this process that writes to the same ones."""
    found = Files(tmp_path)

    async def count(_call: ToolCallRequest) -> ToolResult:
        note(found.effects)
        return succeeded(TextBlock("counted"))

    with built_in("count", count):
        yield found


async def goes_on(engine: Engine, agent: UUID) -> None:
    """Another worker, in this process, finishes the turn."""
    await engine.start()
    await engine.until_idle(agent)


@pytest.mark.parametrize(
    ("die_at", "dies_on", "hits", "interrupted"),
    [
        ("claimed", 1, 1, False),
        ("model_begun", 1, 1, False),
        ("saving", 1, 1, False),  # the output with the call
        ("tools_started", 1, 0, True),  # the start was committed: nobody runs it again, though it never ran
        ("saving", 2, 1, True),  # the result: its effect has happened
        ("model_begun", 2, 1, False),
        ("saving", 3, 1, False),
    ],
)
async def test_killed_at_a_point(
    database: str, files: Files, die_at: str, dies_on: int, hits: int, interrupted: bool
) -> None:
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"count": "always_allow"})
        await engine.say(agent)
        async with process(engine, files, die_at=die_at, dies_on=dies_on) as child:
            async with asyncio.timeout(20):
                assert await child.wait() == -signal.SIGKILL
        await goes_on(engine, agent)
        assert files.hits == hits
        await one_turn(engine, agent, interrupted=interrupted)


@pytest.mark.parametrize("dies_on", [1, 2, 3, 4])
async def test_killed_while_a_save_is_on_its_way(database: str, files: Files, dies_on: int) -> None:
    """Begin, output, result, answer: whether the server got to commit it or not, the turn is whole."""
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"count": "always_allow"})
        await engine.say(agent)
        async with process(engine, files, die_at="sent", dies_on=dies_on) as child:
            async with asyncio.timeout(20):
                assert await child.wait() == -signal.SIGKILL
        await goes_on(engine, agent)
        assert files.hits <= 1
        await one_turn(engine, agent, interrupted=None)


async def one_turn(engine: Engine, agent: UUID, *, interrupted: bool | None) -> None:
    """The log has one turn with one call, one result and one answer; retries kept frontier and attempt."""
    events = await engine.events(agent)
    assert [kind for _, kind, _ in events] == ["agent_input"] * 2 + ["model_output", "tool_result", "model_output"]
    result = events[3][2]
    told = (result["outcome"], result["content_blocks"][0]["text"])
    expected = {True: [("failed", INTERRUPTED_TEXT)], False: [("succeeded", "counted")]}
    assert told in (expected[interrupted] if interrupted is not None else expected[True] + expected[False])
    steps = await engine.sql.fetch("select kind, attempt, frontier, state from steps order by number")
    assert {row["attempt"] for row in steps} == {1}
    assert [row["state"] for row in steps if row["state"] != "interrupted"] == ["succeeded"] * (len(steps) - sum(
        row["state"] == "interrupted" for row in steps
    ))
    for row in steps:
        if row["kind"] == "model":
            assert row["frontier"] in (2, 4)


async def test_stopped_for_longer_than_the_lease_then_continued(database: str, files: Files) -> None:
    """The late worker's model answers after it wakes: it saves nothing, stops, and takes a new identity."""
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"count": "always_allow"})
        await engine.say(agent)
        async with process(engine, files, hold="model", lease_s=1.0) as child:
            await until(lambda: bool(files.reached("model_begun")), "the model is being called", limit_s=20)
            old = (await engine.hot(agent))["worker_id"]
            assert old is not None
            child.send_signal(signal.SIGSTOP)
            [other] = await engine.start(worker_lease_s=1.0)
            await until_worker_is(engine, old, "lapsed")
            await engine.until_idle(agent)
            before = await engine.events(agent)
            files.go.touch()
            child.send_signal(signal.SIGCONT)

            async def again() -> bool:
                return await engine.sql.fetchval("select count(*) from workers where state = 'live'") == 2

            await until(again, "the late worker is back under a new identity", limit_s=20)
            await until(lambda: other.worker.running == 0, "nothing runs")
            assert await engine.events(agent) == before
            assert (await engine.hot(agent))["deaths"] == 0
            assert files.hits == 1


async def test_five_deaths_crash_the_agent_and_the_others_finish(database: str, files: Files) -> None:
    async with engine_on(database, lambda _: say("fine")) as engine:
        [agent, other] = await engine.add_agents(2)
        await engine.say(agent)
        # Each process dies at its first model call; only this agent is ready meanwhile.
        for _ in range(5):
            async with process(engine, files, die_at="model_begun") as child:
                async with asyncio.timeout(20):
                    await child.wait()
            dead = (await engine.hot(agent))["worker_id"]
            [judge] = await engine.start(worker_capacity=0)
            await until_worker_is(engine, dead, "dead")

            async def released() -> bool:
                return (await engine.hot(agent))["worker_id"] is None

            await until(released, "the claim is released")
            await judge.stop()
        hot = await engine.hot(agent)
        assert (hot["gate"], hot["deaths"]) == ("crashed", 5)
        await engine.say(other)
        await engine.start()
        await engine.until_idle(other)
        assert (await engine.hot(other))["gate"] == "open"
        assert [kind for _, kind, _ in await engine.events(agent)].count("model_output") == 0
