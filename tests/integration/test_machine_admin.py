"""What people do to machines by API, as a daemon with work in its hands hears of it.

Source: machines.md §4 (revoking a grant), §8 (deletion, revoked tokens), §14 row 15.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from omnara.ids import IdKind, decode, encode
from omnara.testing import Answer, Call, ModelServer, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, invariants_hold, model_server
from tests.integration.test_machine_sessions import QUICK, Bench, make_bench
from tests.support.machines import RawDaemon, TestMachine, raw_daemon
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

SOURCES = "tools:\n  run_command: {}\nmachine_sources:\n  - machine: "


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model, **QUICK) as running:
        yield running
        await invariants_hold(running)


@pytest_asyncio.fixture(loop_scope="session")
async def bench(server: ApiServer) -> Bench:
    return await make_bench(server)


def machine_path(bench: Bench) -> str:
    return f"/api/v1/orgs/{bench.server.org}/machines/{bench.machine.public_id}"


async def done(server: ApiServer, method: str, path: str, status: int = 204) -> Any:
    answer = await server.call(method, path)
    assert answer.status == status, answer.text
    return answer.json if answer.text else None


async def binding_state(bench: Bench) -> str:
    [row] = await bench.sql.fetch("select state from agent_machine_bindings where id = $1", bench.binding_id)
    return str(row[0])


async def test_a_deleted_machine_ends_its_daemon(bench: Bench) -> None:
    async with raw_daemon(bench.server.url, bench.machine) as daemon:
        running = await bench.queue("sleep 1000")
        await daemon.take(running)
        waiting = await bench.queue("true")
        await done(bench.server, "DELETE", machine_path(bench))
        assert (await daemon.expect("runtime_ended"))["error_code"] == "machine_decommissioned"
        assert (await bench.state(running), await bench.state(waiting)) == ("unknown", "failed")
        assert (await daemon.call("POST", "/bootstrap"))[0] == 401
        assert (await daemon.refused())[0] == 401
    assert await binding_state(bench) == "released"
    listed = await done(bench.server, "GET", f"{bench.server.scope}/machines", 200)
    assert bench.machine.public_id not in {item["id"] for item in listed["data"]}


async def test_a_revoked_token_ends_its_daemon_and_another_takes_over(bench: Bench) -> None:
    tokens = f"{machine_path(bench)}/daemon-tokens"
    first = (await done(bench.server, "GET", tokens, 200))["data"][0]["id"]
    spare = await done(bench.server, "POST", tokens, 201)
    async with raw_daemon(bench.server.url, bench.machine) as daemon:
        running = await bench.queue("sleep 1000")
        await daemon.take(running)
        await done(bench.server, "POST", f"{tokens}/{first}/revoke", 200)
        assert (await daemon.expect("runtime_ended"))["error_code"] == "authorization_revoked"
        assert await bench.state(running) == "unknown"
        assert (await daemon.call("POST", "/bootstrap"))[0] == 401
    waiting = await bench.queue("true")
    machine = bench.machine
    other = TestMachine(machine.id, machine.org_id, machine.project_id, spare["token"])
    async with raw_daemon(bench.server.url, other) as second:
        await second.take(waiting)
        shown = await done(bench.server, "GET", machine_path(bench), 200)
        assert shown["connection_state"] == "online"


async def test_a_token_that_nobody_uses_is_revoked_unnoticed(bench: Bench) -> None:
    tokens = f"{machine_path(bench)}/daemon-tokens"
    spare = await done(bench.server, "POST", tokens, 201)
    async with raw_daemon(bench.server.url, bench.machine) as daemon:
        running = await bench.queue("sleep 1000")
        await daemon.take(running)
        await done(bench.server, "POST", f"{tokens}/{spare['token_record']['id']}/revoke", 200)
        await daemon.beat()
        await daemon.expect("heartbeat_ack")
        assert await bench.state(running) == "starting"


async def test_without_its_grant_a_project_has_nothing_there_until_it_gets_another(bench: Bench) -> None:
    """Another project's commands go on."""
    grants = f"{bench.server.scope}/machine-grants"
    [grant] = [
        item["grant"]["id"]
        for item in (await done(bench.server, "GET", grants, 200))["data"]
        if item["machine"]["id"] == bench.machine.public_id
    ]
    async with raw_daemon(bench.server.url, bench.machine) as daemon:
        running = await bench.queue("sleep 1000")
        public = await daemon.take(running)
        await daemon.started(public)
        waiting = await bench.queue("true")
        await done(bench.server, "DELETE", f"{grants}/{grant}")
        assert (await daemon.expect("process_terminate"))["process_id"] == public
        assert (await bench.state(running), await bench.state(waiting)) == ("running", "failed")
        assert (await daemon.finished(public))["ack_status"] in {"committed", "cleanup_only"}
        assert await bench.state(running) == "exited"
        late = await bench.queue("true")
        await daemon.beat()
        await daemon.expect("heartbeat_ack")
        assert await bench.state(late) == "queued"
        assert await binding_state(bench) == "attached"
        body = {"machine_id": bench.machine.public_id}
        assert (await bench.server.call("POST", grants, body)).status == 201
        bench.server.deps.hints.machines((bench.machine.id,))
        await daemon.take(late)


async def launched(server: ApiServer, name: str) -> tuple[Any, str, RawDaemon]:
    """A machine, and an agent whose command it has got."""
    connected = await server.call(
        "POST", f"/api/v1/orgs/{server.org}/machines/connect", {"display_name": name, "project_ids": [server.project]}
    )
    made = connected.json
    ask = Answer(blocks=(Call("run_command", {"command": "make"}),))
    agent = await server.agent(embed(ask, say("I see.")), source=f"{CONFIG}{SOURCES}{name}\n")
    ids = [decode(kind, value) for kind, value in ((IdKind.ORG, server.org), (IdKind.PROJECT, server.project))]
    machine = TestMachine(decode(IdKind.MACHINE, made["machine"]["id"]), *ids, made["token"])
    daemon = RawDaemon(server.session, server.url, machine.token)
    await daemon.register()
    await daemon.connect()
    return made, agent, daemon


async def test_an_agent_is_told_that_its_machine_was_taken_away(server: ApiServer) -> None:
    """Whatever takes it: the waiting call gets one result, and the agent goes on."""
    for name, act in (
        ("doomed", lambda made: ("DELETE", f"/machines/{made['machine']['id']}", 204)),
        (
            "revoked",
            lambda made: (
                "POST",
                f"/machines/{made['machine']['id']}/daemon-tokens/{made['token_record']['id']}/revoke",
                200,
            ),
        ),
        (
            "withdrawn",
            lambda made: (
                "DELETE",
                f"/projects/{server.project}/machine-grants/{made['project_grants'][0]['id']}",
                204,
            ),
        ),
    ):
        made, agent, daemon = await launched(server, name)
        await daemon.take()
        method, path, status = act(made)
        await done(server, method, f"/api/v1/orgs/{server.org}{path}", status)
        await server.settled(agent)
        events = (await server.get(f"{agent}/events"))["data"]
        [result] = [event for event in events if event["event_kind"] == "tool_result"]
        value = result["content_blocks"][0]["value"]
        assert (result["outcome"], bool(value["error"])) == ("failed", True), value
        assert events[-1]["content_blocks"] == [{"type": "text", "text": "I see."}]
        await daemon.socket.close()


async def test_a_machine_is_deleted_while_commands_come_in(server: ApiServer) -> None:
    """Eight agents ask for three commands each, and nobody takes them: all get an answer, nothing is left behind."""
    body = {"display_name": "crowded", "project_ids": [server.project]}
    made = (await server.call("POST", f"/api/v1/orgs/{server.org}/machines/connect", body)).json
    machine_id = decode(IdKind.MACHINE, made["machine"]["id"])
    ask = Answer(blocks=tuple(Call("run_command", {"command": f"make {n}"}) for n in range(3)))
    source = f"{CONFIG}{SOURCES}crowded\n"
    config = await server.config(source)

    async def launch() -> str:
        answer = await server.call(
            "POST", f"{server.scope}/agents", {"config": config, "message": embed(ask, ask, say("Enough."))}
        )
        assert answer.status == 201, answer.text
        return f"{server.scope}/agents/{answer.json['agent']['id']}"

    agents = await asyncio.gather(*(launch() for _ in range(8)))

    async def some_wait() -> bool:
        return bool(await server.rows("select 1 from processes where machine_id = $1", machine_id))

    await until(some_wait, "commands are queued")
    await done(server, "DELETE", f"/api/v1/orgs/{server.org}/machines/{made['machine']['id']}")
    for agent in agents:
        await server.settled(agent)
        events = (await server.get(f"{agent}/events"))["data"]
        assert events[-1]["content_blocks"] == [{"type": "text", "text": "Enough."}]
        assert sum(event["event_kind"] == "tool_result" for event in events) == 6
    assert await server.rows("select 1 from processes where machine_id = $1 and closed_at is null", machine_id) == []


async def test_what_is_queued_for_nobody_waits_for_a_daemon(server: ApiServer) -> None:
    """The first command of a machine that was never connected is handed over when it is."""
    body = {"display_name": "late", "project_ids": [server.project]}
    made = (await server.call("POST", f"/api/v1/orgs/{server.org}/machines/connect", body)).json
    ask = Answer(blocks=(Call("run_command", {"command": "make"}),))
    agent = await server.agent(embed(ask, say("Done.")), source=f"{CONFIG}{SOURCES}late\n")
    machine_id = decode(IdKind.MACHINE, made["machine"]["id"])

    async def queued() -> bool:
        return bool(await server.rows("select 1 from processes where machine_id = $1", machine_id))

    await until(queued, "the command is queued")
    daemon = RawDaemon(server.session, server.url, made["token"])
    await daemon.register()
    await daemon.connect()
    process = await daemon.take()
    await daemon.finished(process, output="built")
    await server.settled(agent)
    assert encode(IdKind.MACHINE, machine_id) == made["machine"]["id"]
    await daemon.socket.close()
