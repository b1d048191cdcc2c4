"""Files between a machine that really runs commands and the artifacts of its agent, byte for byte.

Source: features.md (upload and download tools); api.md §13; machines.md §7.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db import agents, artifacts
from omnara.db.connection import Connection
from omnara.domain.content import InlineMedia, MediaRefBlock
from omnara.engine.artifacts import attach, take_in
from omnara.engine.artifacts_store import Blobs
from omnara.engine.deps import Deps
from omnara.engine.interactions import resolve
from omnara.engine.machines import transfer
from omnara.engine.machines.files import AgentMachineFiles
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, decode, encode
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.interactions import Answer
from tests.support.crashing import owner
from tests.support.engine import Engine, engine_on
from tests.support.hand_machine import add_machine, bind, processes, results, until_call
from tests.support.live_machine import live_machine
from tests.support.pictures import png

TOOLS = dict.fromkeys(("upload_file", "download_file", "run_command"), "always_allow")
PNG = png(padding=5)


class Desk:
    """An agent with one machine, whose model does what the test says next."""

    def __init__(self, engine: Engine, agent: UUID, folder: Path) -> None:
        self.engine = engine
        self.agent = agent
        self.work = folder / "work"
        self._seen = 0

    async def do(self, name: str, **arguments: Any) -> Any:
        """Have the model call one tool; the value of its result, with its outcome."""
        self.next = (name, arguments)
        self.engine.script = self.script
        await self.engine.say(self.agent)
        await self.engine.until_idle(self.agent, limit_s=40)
        found = await results(self.engine, self.agent)
        self._seen += 1
        assert len(found) == self._seen
        return {"outcome": found[-1][0], **found[-1][1]}

    def script(self, call: ModelCall) -> Outcome:
        """The call, then an answer."""
        request, self.next = self.next, None
        return say("done") if request is None else ask(call, request)

    next: tuple[str, dict[str, Any]] | None = None


@contextlib.asynccontextmanager
async def desk(database: str, folder: Path, **settings: Any) -> AsyncIterator[Desk]:
    """A desk, its machine served from `folder`."""
    async with engine_on(database, lambda call: say("nothing")) as engine:
        [agent] = await engine.add_agents(tools=TOOLS)
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        [replica] = await engine.start(machine_drain_s=0.05, **settings)
        replica.worker.tools = msgspec.structs.replace(
            replica.worker.tools, machine_files=AgentMachineFiles(replica.deps)
        )
        async with live_machine(replica.deps, engine.hints.buses[0], machine_id, folder):
            yield Desk(engine, agent, folder)


async def content(engine: Engine, artifact: str) -> bytes:
    """The bytes of an artifact."""
    artifact_id = decode(IdKind.ARTIFACT, artifact)
    deps = engine.replicas[0].deps
    async with deps.db.acquire() as connection:
        agent = await engine.sql.fetchval("select agent_id from artifacts where id = $1", artifact_id)
        [row] = await artifacts.find_artifacts(connection, agent, [artifact_id])
    return await Blobs().read(deps.db, row, 0, row.size)


async def test_files_go_there_and_back(database: str, tmp_path: Path) -> None:
    text = "".join(random.Random(7).choice("abcdefgh äöü\n") for _ in range(150_000))
    async with desk(database, tmp_path) as at:
        (at.work / "notes ' $(x).md").write_text(text)
        up = await at.do("upload_file", path="notes ' $(x).md")
        assert (up["outcome"], up["type"], up["size"]) == ("succeeded", "text/markdown", len(text.encode()))
        assert await content(at.engine, up["artifact"]) == text.encode()
        down = await at.do("download_file", artifact=up["artifact"], path="deep/er/copy; rm -rf x")
        assert (down["outcome"], down["size"]) == ("succeeded", len(text.encode()))
        assert (at.work / "deep/er/copy; rm -rf x").read_text() == text
        assert [p.name for p in (at.work / "deep/er").iterdir()] == ["copy; rm -rf x"]
        (at.work / "dot.png").write_bytes(PNG)
        picture = await at.do("upload_file", path=str(at.work / "dot.png"), filename="shown.png")
        assert picture["type"] == "image/png"
        again = await at.do("download_file", artifact=f"/artifacts/{picture['artifact']}", path="dot2.png")
        assert again["outcome"] == "succeeded"
        assert (at.work / "dot2.png").read_bytes() == PNG
        rows = await processes(at.engine, at.agent)
        assert [(row["purpose"], row["state"]) for row in rows] == [("upload", "exited"), ("download", "exited")] * 2
        assert await at.engine.sql.fetchval("select count(*) from process_actions") == 0


@pytest.mark.slow
async def test_the_largest_file_takes_seconds(database: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(7_800_000).hex().encode()[: 10 * 1024 * 1024]
    async with desk(database, tmp_path) as at:
        (at.work / "large.txt").write_bytes(data)
        up = await at.do("upload_file", path="large.txt")
        assert (up["outcome"], up["size"]) == ("succeeded", 10 * 1024 * 1024)
        down = await at.do("download_file", artifact=up["artifact"], path="large2.txt")
        assert down["outcome"] == "succeeded"
        assert (at.work / "large2.txt").read_bytes() == data


async def test_what_cannot_go_is_told(database: str, tmp_path: Path) -> None:
    async with desk(database, tmp_path) as at:
        (at.work / "huge").write_bytes(b"x" * (10 * 1024 * 1024 + 1))
        (at.work / "empty").write_bytes(b"")
        (at.work / "binary").write_bytes(bytes(range(256)))
        (at.work / "folder").mkdir()
        (at.work / "good").write_text("good")
        codes = [(await at.do("upload_file", path=path))["error_code"] for path in ("none", "huge", "empty", "binary")]
        assert codes == ["file_not_found", "file_too_large", "file_too_large", "file_not_accepted"]
        up = await at.do("upload_file", path="good")
        unknown = encode(IdKind.ARTIFACT, UUID(int=5))
        for artifact, path, code in (
            (unknown, "x", "artifact_not_found"),
            ("nonsense", "x", "artifact_not_found"),
            (up["artifact"], "folder", "file_not_written"),
            (up["artifact"], "good/below", "file_not_written"),
        ):
            assert (await at.do("download_file", artifact=artifact, path=path))["error_code"] == code
        assert sorted(path.name for path in at.work.iterdir()) == ["binary", "empty", "folder", "good", "huge"]


async def test_a_silent_machine_ends_the_transfer(database: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transfer, "LIMIT_S", 0.3)
    async with engine_on(database, lambda call: ask(call, ("upload_file", {"path": "x"}))) as engine:
        [agent] = await engine.add_agents(tools=TOOLS)
        await bind(engine, agent, await add_machine(engine), "mchr-aaaaaa")
        await engine.sql.execute("update machines set activated_at = now()")
        [replica] = await engine.start()
        replica.worker.tools = msgspec.structs.replace(
            replica.worker.tools, machine_files=AgentMachineFiles(replica.deps)
        )
        engine.script = _once("upload_file", {"path": "x"})
        await engine.say(agent)
        await engine.until_idle(agent)
        [(outcome, value)] = await results(engine, agent)
        assert (outcome, value["error_code"], value["retryable"]) == ("failed", "file_transfer_timeout", True)
        assert [row["state"] for row in await processes(engine, agent)] == ["failed"]


@pytest.mark.parametrize("name", ["upload_file", "download_file"])
async def test_what_was_allowed_is_not_done_on_a_machine_that_came_later(
    database: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LIMIT_S", 0.3)
    async with engine_on(database, lambda call: say("done")) as engine:
        [agent] = await engine.add_agents(tools={name: "always_ask"})
        first = await bind(engine, agent, await add_machine(engine, "first"), "mine")
        [replica] = await engine.start()
        deps = replica.deps
        replica.worker.tools = msgspec.structs.replace(replica.worker.tools, machine_files=AgentMachineFiles(deps))
        arguments = {"path": "x"} | ({"artifact": await an_artifact(deps, agent)} if "down" in name else {})

        async def asked() -> None:
            engine.script = _once(name, arguments)
            await engine.say(agent)
            await until_call(engine, agent, name, "awaiting_permission")

        async def allowed() -> tuple[str, Any]:
            query = "select id from interactions where agent_id = $1 and state = 'open'"
            form = await engine.sql.fetchval(query, agent)
            await resolve(deps, owner(engine), AgentPath(agent), form, [Answer((0,))])
            await engine.until_idle(agent)
            outcome, value = (await results(engine, agent))[-1]
            return outcome, value["error_code"]

        await asked()
        # Another machine gets the name of the one that was meant.
        await engine.sql.execute("delete from agent_machine_bindings where id = $1", first)
        await bind(engine, agent, await add_machine(engine, "second"), "mine")
        assert await allowed() == ("failed", "tool_authorization_invalidated")
        assert await processes(engine, agent) == []
        # Asked for again, it is meant for the machine that is there now, which does not answer.
        await asked()
        assert await allowed() == ("failed", "file_transfer_timeout")
        assert len(await processes(engine, agent)) == 1


async def an_artifact(deps: Deps, agent_id: UUID) -> str:
    """Keep a text as a file of the agent's; its name."""
    async with deps.db.acquire() as connection:
        agent = await agents.locate_agent(connection, agent_id)
    assert agent is not None
    media = InlineMedia("text/plain", base64.b64encode(b"text").decode(), "text.txt")
    [block], taken = await take_in(deps, agent.org_id, [media])
    assert isinstance(block, MediaRefBlock)

    async def keep(connection: Connection) -> None:
        await attach(connection, agent, taken, loose=True)

    await deps.db.run(keep)
    return block.artifact_id


@pytest.mark.parametrize("name", ["upload_file", "download_file"])
async def test_without_machines_there_is_a_clear_answer(database: str, name: str) -> None:
    arguments = {"path": "x"} | ({"artifact": encode(IdKind.ARTIFACT, UUID(int=5))} if "down" in name else {})
    async with engine_on(database, _once(name, arguments)) as engine:
        [agent] = await engine.add_agents(tools=TOOLS)
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        [(outcome, value)] = await results(engine, agent)
        assert (outcome, value["error_code"]) == ("failed", "unsupported")


def _once(name: str, arguments: dict[str, Any]) -> Any:
    asked = asyncio.Event()

    def script(call: ModelCall) -> Outcome:
        if asked.is_set():
            return say("done")
        asked.set()
        return ask(call, (name, arguments))

    return script
