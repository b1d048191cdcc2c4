"""An engine of the test's own is away for a minute, with machines that run, sleep and wait: all of them come back.

The defaults of every time constant, so these are `slow`. What ran is told as lost, or goes on where the engine keeps
containers alive without it (`--live-restore`); nothing runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omnara.machines.providers.docker import DockerProvider
from omnara.testing import Answer, call, embed, say
from tests.support.agent_handle import Handle
from tests.support.docker_boxes import Boxes, boxes_on, held, said
from tests.support.docker_engine import BUSYBOX_IMAGE, SANDBOX_IMAGE
from tests.support.docker_own import OwnEngine, own_engine
from tests.support.machine_chaos import results, run
from tests.support.postgres import PostgresForTests
from tests.support.times import DEFAULT
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AWAY_S = 60.0
BACK_S = 60.0
"""From the engine's return until every machine works again, at most."""
LOST = "local_process_missing_after_daemon_reconnect"


@contextlib.asynccontextmanager
async def site(postgres: PostgresForTests, directory: Path, *options: str) -> AsyncIterator[tuple[OwnEngine, Boxes]]:
    """An engine with a small sandbox image, and a server that uses it."""
    async with own_engine(*options) as engine:
        words = ["docker", "-H", engine.endpoint, "tag", BUSYBOX_IMAGE, SANDBOX_IMAGE]
        await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)
        provider = DockerProvider(engine.endpoint)
        try:
            async with boxes_on(postgres, directory, DEFAULT, provider, engine.endpoint) as boxes:
                try:
                    yield engine, boxes
                finally:
                    if not engine.running:
                        await engine.start()
        finally:
            await provider.close()


async def asleep(boxes: Boxes, agent: Handle) -> None:
    """Let an agent's machine sleep when it has nothing to do, and wait until its container is paused."""
    await boxes.cluster.sql.execute(
        "update machines set provider_options = '{\"sleep_after_ms\": 30000}' where id in"
        " (select machine_id from agent_machine_bindings where agent_id = $1)",
        agent.uuid,
    )
    container = await boxes.container(agent)

    async def paused() -> bool:
        async with boxes.provider.engine.call() as docker:
            shown = await docker.containers.container(container).show()
        return bool(shown["State"]["Status"] == "paused")

    await until(paused, "the container is paused", limit_s=90)


async def online(boxes: Boxes, agent: Handle) -> None:
    """Wait until an agent's machine is driven again; until then a command is refused at once, to be tried later."""
    query = (
        "select c.state from machine_connections c join agent_machine_bindings b on b.machine_id = c.machine_id"
        " where b.agent_id = $1"
    )

    async def there() -> bool:
        return bool(await boxes.cluster.sql.fetchval(query, agent.uuid) == "online")

    await until(there, "its machine is online", limit_s=BACK_S)


async def ask(boxes: Boxes, agent: Handle, command: str, answer: str) -> None:
    """Say something to an agent that makes it run a command and answer."""
    text = f"now {answer}"
    await boxes.client.send(agent.id, embed(call("run_command", {"command": command}), say(answer), text=text))


async def last(agent: Handle) -> str:
    """The output of an agent's last command, or why there is none."""
    outcome, value = (await results(agent))[-1]
    return str(value["output"] if outcome == "succeeded" else value)


@pytest.mark.parametrize("how", ["stopped", "killed", "kept"])
async def test_machines_of_an_engine_that_was_away_for_a_minute(
    postgres: PostgresForTests, tmp_path: Path, how: str
) -> None:
    options = ("--live-restore",) if how == "kept" else ()
    async with site(postgres, tmp_path, *options) as (engine, boxes):
        loop = asyncio.get_running_loop()
        sleepers = [await boxes.agent(Answer(blocks=(run("echo kept > file"),)), say("made")) for _ in range(2)]
        background = await boxes.agent(Answer(blocks=(run(held(), wait_ms=100),)), say("it runs"))
        for agent in (*sleepers, background):
            await agent.settled()
        for agent in sleepers:
            await asleep(boxes, agent)
        waiting = await boxes.agent(Answer(blocks=(run(held(), wait_ms=10_000),)), say("heard"))
        await boxes.has_lines(await boxes.container(waiting), "log", ["begun"])

        gone = loop.time()
        await asyncio.to_thread(engine.stop, signal.SIGKILL if how == "killed" else signal.SIGTERM)
        await ask(boxes, sleepers[0], "cat file", "tried")
        await waiting.settled()
        assert loop.time() - gone < 50
        assert "machine_unreachable" in await last(waiting)
        await asyncio.sleep(max(0.0, gone + AWAY_S - 20 - loop.time()))
        assert "machine_unreachable" in await last(sleepers[0])
        new = await boxes.agent(Answer(blocks=(run("echo new >> log; cat log"),)), say("made"))
        await asyncio.sleep(max(0.0, gone + AWAY_S - loop.time()))
        await engine.start()

        back = loop.time()
        for agent in sleepers:
            await ask(boxes, agent, "cat file", "back")
        for agent in (background, waiting):
            await online(boxes, agent)
            await ask(boxes, agent, "echo again >> log; cat log", "back")
        for agent in (*sleepers, background, waiting):
            await until(lambda agent=agent: said(agent, "back"), "it works again", limit_s=BACK_S)  # type: ignore[misc]
        await new.settled()
        assert [await last(agent) for agent in (*sleepers, background, waiting, new)] == [
            *["kept\n"] * 2, *["begun\nagain\n"] * 2, "new\n",
        ]  # fmt: skip
        assert loop.time() - back < BACK_S
        await commands_ended(boxes, (background, waiting), lost=how != "kept")


async def commands_ended(boxes: Boxes, agents: tuple[Handle, ...], *, lost: bool) -> None:
    """What ran when the engine went is told as lost; or it still runs in the same container, and ends when it may."""
    for agent in agents:
        if not lost:
            await boxes.inside(await boxes.container(agent), "touch stop")

        async def over(agent: Handle = agent) -> bool:
            query = "select closed_at is not null from processes where agent_id = $1 order by created_at, id limit 1"
            return bool(await boxes.cluster.sql.fetchval(query, agent.uuid))

        await until(over, "its first command is over", limit_s=30)
        query = "select state, reason_code from processes where agent_id = $1 order by created_at, id limit 1"
        rows = await boxes.cluster.sql.fetch(query, agent.uuid)
        assert tuple(rows[0]) == (("unknown", LOST) if lost else ("exited", ""))
        log = (await boxes.inside(await boxes.container(agent), "cat log")).split()
        assert log == (["begun", "again"] if lost else ["begun", "again", "over"])
