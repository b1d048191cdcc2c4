"""What makes no sense, all the way from a model's call to a real daemon and back: a clear result, and nothing stuck.

Also where one project's machine must be out of another's reach. Source: machines.md §7; engine.md §7.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, decode, encode
from omnara.machines.daemon.config import Home
from omnara.machines.daemon.run import run_daemon
from omnara.setting_daemon import DaemonSettings
from omnara.testing import Answer, Call, ModelServer, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, invariants_hold, model_server
from tests.integration.test_machine_sessions import QUICK
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

TOOLS = "tools: {run_command: {}, read_process: {}, write_process: {}, stop_process: {}}\n"
FIRST = {"$result": 0, "path": ["process_id"]}
"""The process of the first call."""


class Lab:
    """A server with a connected machine `box` whose daemon runs in this process."""

    def __init__(self, server: ApiServer, machine: Any) -> None:
        self.server = server
        self.machine = machine
        self.org = f"/api/v1/orgs/{server.org}"

    async def told(self, *calls: Call, config: str = "") -> list[tuple[str, Any]]:
        """Let an agent make these calls one after another; outcome and value of each result."""
        answers = [Answer(blocks=(call,)) for call in calls]
        source = f"{CONFIG}{TOOLS}{config or 'machine_sources: [{machine: box}]'}\n"
        agent = await self.server.agent(embed(*answers, say("So be it.")), source=source)
        await self.server.settled(agent)
        events = (await self.server.get(f"{agent}/events?limit=500"))["data"]
        assert events[-1]["content_blocks"] == [{"type": "text", "text": "So be it."}], "the agent goes on"
        results = [event for event in events if event["event_kind"] == "tool_result"]
        assert len(results) == len(calls)
        return [(result["outcome"], result["content_blocks"][0]["value"]) for result in results]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(
    postgres: PostgresForTests, model: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(postgres.fresh())
        server = await stack.enter_async_context(api_server(dsn, model, **QUICK))
        body = {"display_name": "box", "project_ids": [server.project]}
        made = (await server.call("POST", f"/api/v1/orgs/{server.org}/machines/connect", body)).json
        lab = Lab(server, made["machine"])
        await stack.enter_async_context(daemon(lab, made["token"], tmp_path_factory.mktemp("machine")))
        yield lab
        await invariants_hold(server)


@contextlib.asynccontextmanager
async def daemon(lab: Lab, token: str, root: Path) -> AsyncIterator[None]:
    """The machine's daemon, online."""
    environment = {"PATH": "/usr/bin:/bin"}
    settings = DaemonSettings(home=root, api_url=lab.server.url, machine_token=token, environment=environment)
    stop = asyncio.Event()
    work = asyncio.create_task(run_daemon(settings, Home(root), stop))

    async def online() -> bool:
        shown = await lab.server.get(f"{lab.org}/machines/{lab.machine['id']}")
        return bool(shown["connection_state"] == "online")

    try:
        await until(online, "the machine is online")
        yield
    finally:
        stop.set()
        assert await work == 0


def run(command: str, **more: Any) -> Call:
    return Call("run_command", {"command": command, **more})


async def test_what_cannot_be_started_says_why(lab: Lab) -> None:
    shell, cwd, file, pty = await lab.told(
        run("true", shell="zsh"),
        run("true", cwd="/no/such/place"),
        run("true", cwd="/etc/passwd"),
        run("true", shell="powershell"),
    )
    for outcome, value in (shell, cwd, file, pty):
        assert outcome == "failed", value
        assert value["error"] or value["error_code"], value
    assert "zsh" in str(shell)
    assert "/no/such/place" in str(cwd)


async def test_a_machine_that_is_none_of_its_business_is_no_machine(lab: Lab) -> None:
    """By its id, of another project of the same organization; and a config cannot name it either."""
    project = (await lab.server.call("POST", f"{lab.org}/projects", {"name": "other"})).json["id"]
    body = {"display_name": "theirs", "project_ids": [project]}
    theirs = (await lab.server.call("POST", f"{lab.org}/machines/connect", body)).json["machine"]["id"]
    for outcome, value in await lab.told(
        run("true", machine_id=theirs),
        run("true", machine_ref=theirs),
        run("true", machine_id="mch_nonsense"),
        run("true", machine_id="../../etc"),
    ):
        assert (outcome, value["error_code"]) == ("failed", "machine_ref_unavailable")
    count = "select 1 from processes where machine_id = $1"
    assert await lab.server.rows(count, decode(IdKind.MACHINE, theirs)) == []
    for name in ("theirs", theirs):
        source = f"{CONFIG}{TOOLS}machine_sources: [{{machine: {name}}}]\n"
        body = {"source": source, "source_format": "yaml"}
        answer = await lab.server.call("POST", f"{lab.server.scope}/agent-configs", body)
        assert (answer.status, answer.code) == (400, "invalid_request")


async def test_another_agents_process_is_no_process(lab: Lab) -> None:
    """On the same machine, in the same project. It ends when its own agent does."""
    [(_, started)] = await lab.told(run("sleep 1000", wait_ms=1))
    process = started["process_id"]
    for outcome, value in await lab.told(
        Call("read_process", {"process_id": process}),
        Call("write_process", {"process_id": process, "data": "x"}),
        Call("stop_process", {"process_id": process}),
    ):
        assert (outcome, value["error_code"]) == ("failed", "process_not_found")
    query = "select agent_id, state from processes where id = $1"
    process_id = decode(IdKind.PROCESS, process)
    [[agent_id, state]] = await lab.server.rows(query, process_id)
    assert state == "running"
    path = f"{lab.server.scope}/agents/{encode(IdKind.AGENT, agent_id)}/archive"
    assert (await lab.server.call("POST", path)).status == 200

    async def over() -> bool:
        [[_, state]] = await lab.server.rows(query, process_id)
        return bool(state == "unknown")  # what the server ends has no outcome of its own

    await until(over, "the command was ended")


async def test_what_is_asked_of_a_process_that_is_over(lab: Lab) -> None:
    done, write, stop, beyond, again = await lab.told(
        run("printf seven!!"),
        Call("write_process", {"process_id": FIRST, "data": "x"}),
        Call("stop_process", {"process_id": FIRST}),
        Call("read_process", {"process_id": FIRST, "cursor": 10_000}),
        Call("read_process", {"process_id": FIRST, "cursor": 2}),
    )
    assert (done[1]["output"], done[1]["exit_code"], done[1]["done"]) == ("seven!!", 0, True)
    assert (write[0], bool(write[1]["error_code"])) == ("failed", True)
    assert stop[0] in {"succeeded", "failed"}, "it has stopped already, or cannot be stopped any more"
    assert beyond[1].get("output", "") == "", "nothing is there, and nobody waits for it"
    assert (again[0], again[1]["output"]) == ("succeeded", "ven!!")


async def test_a_character_that_is_cut_by_a_read_is_whole_in_the_next(lab: Lab) -> None:
    """Reads of odd sizes; and bytes that are no UTF-8 at all are shown as such, once each."""
    [_, *reads] = await lab.told(
        run("printf 'a€b\\377c€'"),
        *(Call("read_process", {"process_id": FIRST, "max_bytes": 3, "cursor": 0}),),
        *(Call("read_process", {"process_id": FIRST, "max_bytes": 4, "cursor": cursor}) for cursor in (1, 5)),
        Call("read_process", {"process_id": FIRST, "max_bytes": 3, "cursor": 7}),
    )
    values = [value for _, value in reads]
    assert [value["output"] for value in values[:3]] == ["a", "€b", "?c"]
    assert [value["next_cursor"] for value in values[:3]] == [1, 5, 7]
    assert values[3]["output"] == "€"


async def test_what_a_secret_holds_is_not_shown_when_a_command_says_it(lab: Lab) -> None:
    value = "a secret of great length"
    body = {"owner": {"kind": "org"}, "name": "echoed", "material": {"kind": "generic", "value": value}}
    secret = (await lab.server.call("POST", f"{lab.org}/secrets", body)).json["id"]
    path = f"{lab.org}/machines/{lab.machine['id']}"
    answer = await lab.server.call("PATCH", path, {"secret_env": {"TOKEN": secret}, "env": {"PLAIN": "seen"}})
    assert answer.status == 200, answer.text
    [(_, said)] = await lab.told(run('echo "$TOKEN $PLAIN"'))
    assert value not in said["output"]
    assert said["output"].endswith(" seen\n")
    stored = "select 1 from processes where env::text like $1 or secret_env::text like $1"
    assert await lab.server.rows(stored, f"%{value}%") == []
