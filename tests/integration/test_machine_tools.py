"""The machine tools in a running engine: exactly one process per call, one result, whatever is mixed or dies.

The machine is driven by hand through the engine's own functions. Source: engine.md §7; machines.md §4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.db import machine_calls
from omnara.db.hintwire import Kind
from omnara.domain.content import TextBlock
from omnara.domain.message import AssistantMessage
from omnara.engine.cancel import cancel_agent
from omnara.engine.interactions import resolve
from omnara.engine.lifecycle import archive
from omnara.engine.results import submit_result
from omnara.engine.resume import resume
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.interactions import Answer
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.tools.registry import MACHINE_TOOLS, POOL_TOOLS
from tests.support.crashing import owner, step_states
from tests.support.engine import Engine, built_in, engine_on
from tests.support.hand_machine import (
    HandMachine,
    add_machine,
    bind,
    call_states,
    processes,
    public,
    results,
    until_call,
)

ALL = dict.fromkeys((*MACHINE_TOOLS, *POOL_TOOLS), "always_allow")
Request = tuple[str, dict[str, Any]]


def scripted(*turns: list[Request]) -> Callable[[ModelCall], Outcome]:
    """A model that asks for each list of calls in its turn, and then is done."""

    def script(call: ModelCall) -> Outcome:
        asked = sum(isinstance(message, AssistantMessage) for message in call.context.messages())
        return ask(call, *turns[asked]) if asked < len(turns) else say("done")

    return script


async def one_machine(engine: Engine, **columns: Any) -> tuple[UUID, HandMachine]:
    """An agent with every machine tool and one connected machine, and a worker that serves it."""
    [agent] = await engine.add_agents(tools=ALL)
    machine_id = await add_machine(engine, **columns)
    await bind(engine, agent, machine_id, "mchr-aaaaaa")
    [replica] = await engine.start()
    machine = HandMachine(replica.deps, machine_id)
    await machine.connect()
    return agent, machine


# --- one command ------------------------------------------------------------------------------------------


async def test_a_command_waits_for_its_machine_and_its_result_goes_on(database: str) -> None:
    run = ("run_command", {"command": "make", "cwd": "src", "wait_ms": 2000})
    async with engine_on(database, scripted([run])) as engine:
        agent, machine = await one_machine(engine, cwd="/home/me", env='{"CI":"1"}')
        await engine.say(agent)
        offer = await machine.take()
        assert (offer.command, offer.cwd, offer.env, offer.wait_ms) == ("make", "/home/me/src", {"CI": "1"}, 2000)
        assert (await call_states(engine, agent))["run_command"] == ["waiting"]
        await engine.until_idle(agent)  # nothing polls while the machine works
        assert (await machine.finished(offer.process_id, "ok\n")).ack_status == "committed"
        await engine.until_idle(agent)
        [(outcome, value)] = await results(engine, agent)
        assert outcome == "succeeded"
        assert value["output"] == "ok\n"
        assert (value["process_id"], value["state"], value["exit_code"]) == (offer.process_id, "exited", 0)
        assert (await engine.events(agent))[-1][2]["content_blocks"] == [{"type": "text", "text": "done"}]
        assert await step_states(engine, agent) == ["succeeded"] * 3


@pytest.mark.parametrize("connected", [True, False])
async def test_a_command_for_a_machine_that_is_there_concerns_its_channel_alone(database: str, connected: bool) -> None:
    """Who makes, wakes and drives machines looks only when one is not there: a look is several statements."""
    async with engine_on(database, scripted([("run_command", {"command": "make"})])) as engine:
        [agent] = await engine.add_agents(tools=ALL)
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        [replica] = await engine.start()
        machine = HandMachine(replica.deps, machine_id)
        if connected:
            await machine.connect()
        with engine.hints.buses[0].subscribe({Kind.MACHINES, Kind.COMMANDS}) as heard:
            await engine.say(agent)
            async with asyncio.timeout(20):
                batch = await heard.get()
        assert batch.ids == {Kind.COMMANDS if connected else Kind.MACHINES: frozenset({str(machine_id)})}
        if not connected:
            await machine.connect()
        await machine.finished((await machine.take()).process_id)
        await engine.until_idle(agent)


async def test_a_tools_step_without_effects_costs_no_second_claim(database: str) -> None:
    turns = scripted([("list_machines", {})], [("list_processes", {}), ("list_machines", {})])
    async with engine_on(database, turns) as engine:
        agent, _ = await one_machine(engine)
        await engine.say(agent)
        await engine.until_idle(agent)
        assert (await engine.hot(agent))["epoch"] == 1
        assert [outcome for outcome, _ in await results(engine, agent)] == ["succeeded"] * 3
        assert await step_states(engine, agent) == ["succeeded"] * 5
        assert (await engine.hot(agent))["epoch"] == 1


async def test_many_calls_of_one_batch_mixed_with_others(database: str) -> None:
    gate = asyncio.Event()

    async def look(_: ToolCallRequest) -> ToolResult:
        await gate.wait()
        return succeeded(TextBlock("looked"))

    batch: list[Request] = [
        ("outside", {}),
        ("run_command", {"command": "one"}),
        ("hand", {}),
        ("list_processes", {}),
        ("run_command", {"command": "two"}),
        ("outside", {}),
    ]
    with built_in("outside", look):
        async with engine_on(database, scripted(batch)) as engine:
            [agent] = await engine.add_agents(tools=ALL | {"outside": "always_allow", "hand": "always_allow"})
            machine_id = await add_machine(engine)
            await bind(engine, agent, machine_id, "mchr-aaaaaa")
            [replica] = await engine.start()
            machine = HandMachine(replica.deps, machine_id)
            await machine.connect()
            await engine.say(agent)
            first, second = await machine.offered(2)
            assert [first.command, second.command] == ["one", "two"]
            assert await machine.accept(first)
            await machine.finished(first.process_id, "1")  # while the outside calls still run under the claim
            assert (await call_states(engine, agent))["run_command"] == ["completed", "waiting"]
            assert (await call_states(engine, agent))["outside"] == ["running", "running"]
            gate.set()
            await until_call(engine, agent, "outside", "completed")
            await machine.accept(second)
            await machine.finished(second.process_id, "2")
            hand = await engine.sql.fetchval("select id from tool_calls where agent_id = $1 and name = 'hand'", agent)
            await answer_custom(engine, agent, hand)
            await engine.until_idle(agent)
            found = await results(engine, agent)
            assert sorted(str(value.get("output") if isinstance(value, dict) else value) for _, value in found) == [
                "1",
                "2",
                "None",
                "by hand",
                "looked",
                "looked",
            ]
            assert len(await processes(engine, agent)) == 2
            assert (await engine.events(agent))[-1][2]["content_blocks"][0]["text"] == "done"


async def answer_custom(engine: Engine, agent: UUID, call_id: UUID) -> None:
    """Complete a custom call as its client does."""
    await submit_result(
        engine.replicas[0].deps, owner(engine), AgentPath(agent), call_id, "succeeded", [TextBlock("by hand")]
    )


# --- what a model is told of its mistakes -------------------------------------------------------------------


MISTAKES: list[tuple[Request, str]] = [
    (("run_command", {"command": "x", "machine_ref": "mchr-zzzzzz"}), "machine_ref_unavailable"),
    (("run_command", {"command": "x", "machine_id": "nonsense"}), "machine_ref_unavailable"),
    (("run_command", {"command": "a\0b"}), "malformed"),
    (("run_command", {"command": "x" * 131_072}), "malformed"),
    (("run_command", {"command": " "}), "malformed"),
    (("run_command", {"command": "x", "shell": "fish"}), "malformed"),
    (("run_command", {"command": "x", "wait_ms": 10_001}), "malformed"),
    (("run_command", {}), "malformed"),
    (("read_process", {"process_id": "prc_nonsense"}), "process_not_found"),
    (("read_process", {"process_id": encode(IdKind.PROCESS, new_uuid())}), "process_not_found"),
    (("read_process", {"process_id": "prc_x", "max_bytes": 65_537}), "malformed"),
    (("read_process", {"process_id": "prc_x", "cursor": -1}), "malformed"),
    (("write_process", {"process_id": "prc_x"}), "malformed"),
    (("write_process", {"process_id": "prc_x", "data": "é" * 65_537}), "malformed"),
    (("stop_process", {"process_id": "prc_x"}), "process_not_found"),
    (("stop_process", {"process_id": "prc_x", "mode": "kill"}), "malformed"),
    (("inspect_machine", {"machine_ref": "x"}), "machine_ref_unavailable"),
    (("delete_machine", {}), "machine_not_deletable"),
    (("create_machine", {}), "machine_pool_unavailable"),
]


async def test_bad_input_is_a_clear_result(database: str) -> None:
    async with engine_on(database, scripted([request for request, _ in MISTAKES])) as engine:
        agent, _ = await one_machine(engine)
        await engine.sql.execute("update configured_model_revisions set context_window_tokens = 1000000")
        await engine.say(agent)
        await engine.until_idle(agent)
        rows = await engine.sql.fetch(
            """select e.payload from tool_calls t
               join events e on e.agent_id = t.agent_id and e.sequence = t.result_sequence
               where t.agent_id = $1 order by t.ordinal""",
            agent,
        )
        found = [msgspec.json.decode(row["payload"]) for row in rows]
        codes = [result["content_blocks"][0]["value"]["error_code"] for result in found]
        assert codes == [code for _, code in MISTAKES]
        assert {result["outcome"] for result in found} == {"failed"}
        assert await processes(engine, agent) == []
        assert (await engine.events(agent))[-1][2]["content_blocks"][0]["text"] == "done"


async def test_the_choice_of_a_machine(database: str) -> None:
    run: Request = ("run_command", {"command": "x"})
    ref: Request = ("run_command", {"command": "x", "machine_ref": "second"})
    async with engine_on(database, scripted([run], [run], [ref])) as engine:
        [agent] = await engine.add_agents(tools=ALL)
        [replica] = await engine.start(sandbox="off")
        await engine.say(agent)
        await engine.until_idle(agent)
        assert [value["error_code"] for _, value in await results(engine, agent)] == [
            "no_active_agent_machine_binding"
        ] * 2 + ["machine_ref_unavailable"]
        [agent] = await engine.add_agents(tools=ALL)
        first, second = await add_machine(engine, "first"), await add_machine(engine, "second")
        await bind(engine, agent, first, "first")
        await bind(engine, agent, second, "second")
        machine = HandMachine(replica.deps, second)
        await machine.connect()
        await engine.say(agent)
        offer = await machine.take()
        await machine.finished(offer.process_id)
        await engine.until_idle(agent)
        found = await results(engine, agent)
        assert [value.get("error_code") for _, value in found] == ["machine_selection_required"] * 2 + [None]
        assert found[0][1]["machine_refs"] == ["first", "second"]


async def test_a_machine_of_another_project_is_none_of_the_agents(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})])) as engine:
        agent, machine = await one_machine(engine)
        await engine.sql.execute("update machine_grants set deleted_at = now() where machine_id = $1", machine.id)
        await engine.say(agent)
        await engine.until_idle(agent)
        [(_, value)] = await results(engine, agent)
        assert value["error_code"] == "no_active_agent_machine_binding"


async def test_a_machine_that_is_long_gone_is_told_at_once(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})], [("inspect_machine", {})])) as engine:
        engine.settings = msgspec.structs.replace(engine.settings, machine_grace_s=0.1)  # Postgres is young
        agent, machine = await one_machine(engine)
        await machine.disconnect()
        await engine.sql.execute("update machine_runtimes set disconnected_at = now() - interval '5 minutes'")
        await engine.sql.execute("update workers set started_at = now() - interval '5 minutes'")
        await engine.say(agent)
        await engine.until_idle(agent)
        (_, value), (_, shown) = await results(engine, agent)
        assert (value["error_code"], value["retryable"]) == ("machine_unreachable", True)
        assert 300 <= value["offline_for_s"] <= shown["offline_for_s"] < 400
        assert (shown["connection"], shown["state"]) == ("offline", "active")


async def test_after_an_outage_of_ours_a_machine_is_waited_for(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})])) as engine:
        agent, machine = await one_machine(engine)
        await machine.disconnect()
        ago = "now() - interval '5 minutes'"
        await engine.sql.execute(f"update machine_runtimes set disconnected_at = {ago}, lease_expires_at = {ago}")
        await engine.say(agent)
        await engine.until_idle(agent)
        assert (await call_states(engine, agent))["run_command"] == ["waiting"]
        await machine.connect()
        offer = await machine.take()
        assert (await machine.finished(offer.process_id)).ack_status == "committed"


async def test_the_limit_of_processes(database: str) -> None:
    batch: list[Request] = [("run_command", {"command": f"c{number}"}) for number in range(33)]
    async with engine_on(database, scripted(batch)) as engine:
        agent, machine = await one_machine(engine)
        await engine.say(agent)
        await machine.offered(4)
        await engine.until_idle(agent)
        assert len(await processes(engine, agent)) == 32
        [(outcome, value)] = await results(engine, agent)
        assert (outcome, value["error_code"]) == ("failed", "agent_process_limit_reached")
        await cancel_agent(engine.replicas[0].deps, owner(engine), AgentPath(agent))
        assert {row["state"] for row in await processes(engine, agent)} == {"failed"}


async def test_a_command_of_a_megabyte_is_refused_with_the_limit_and_a_long_one_runs(database: str) -> None:
    run: Request = ("run_command", {"command": "x" * 1_000_000})
    long = "true " + "x" * 131_066
    asked = iter([run, ("run_command", {"command": long})])

    def script(call: ModelCall) -> Outcome:
        request = next(asked, None)
        return say("done") if request is None else ask(call, request)

    async with engine_on(database, script) as engine:
        agent, machine = await one_machine(engine)
        await engine.sql.execute("update configured_model_revisions set context_window_tokens = 1000000")
        await engine.say(agent)
        offer = await machine.take()
        assert offer.command == long
        await machine.finished(offer.process_id)
        await engine.until_idle(agent)
        (_, refused), (outcome, _) = await results(engine, agent)
        assert "131071" in refused["error"]
        assert outcome == "succeeded"


# --- following a process -------------------------------------------------------------------------------------


async def test_a_background_process_is_read_written_and_stopped(database: str) -> None:
    step = {"number": 0}
    name = {"id": ""}

    def script(call: ModelCall) -> Outcome:
        step["number"] += 1
        steps: list[Request] = [
            ("run_command", {"command": "cat"}),
            ("write_process", {"process_id": name["id"], "data": "hello\n"}),
            ("read_process", {"process_id": name["id"], "wait_ms": 500}),
            ("list_processes", {}),
            ("stop_process", {"process_id": name["id"]}),
            ("stop_process", {"process_id": name["id"]}),
            ("write_process", {"process_id": name["id"], "data": "more"}),
            ("read_process", {"process_id": name["id"], "cursor": 0}),
        ]
        return ask(call, steps[step["number"] - 1]) if step["number"] <= len(steps) else say("done")

    async with engine_on(database, script) as engine:
        agent, machine = await one_machine(engine)
        await engine.say(agent)
        offer = await machine.take()
        name["id"] = offer.process_id
        await machine.started(offer.process_id)
        write = await machine.take_action()
        assert (write.action_kind, bytes(write.payload)) == ("write", b'{"data":"hello\\n"}')
        await machine.applied(write)
        read = await machine.take_action()
        assert (read.action_kind, read.seq) == ("read", 2)
        await machine.applied(read, "hello\n")
        stop = await machine.take_action()
        assert stop.action_kind == "terminate"
        await machine.applied(stop)
        await until_call(engine, agent, "write_process", "completed")
        await machine.killed(offer.process_id)
        last = await machine.take_action()
        assert bytes(last.payload) == b'{"max_bytes":8192,"cursor":0}'
        await machine.applied(last, "hello\n")
        await engine.until_idle(agent)
        found = await results(engine, agent)
        assert [outcome for outcome, _ in found] == ["succeeded"] * 6 + ["failed", "succeeded"]
        started, written, seen, listed, stopped, again, refused, all_of_it = (value for _, value in found)
        assert (started["state"], written["applied"], seen["output"]) == ("running", True, "hello\n")
        assert [entry["process_id"] for entry in listed["processes"]] == [offer.process_id]
        assert (stopped["applied"], again["applied"]) == (True, True)
        assert refused["error_code"] in ("process_ending", "process_terminal")
        assert all_of_it["output"] == "hello\n"
        rows = await engine.sql.fetch("select kind, seq, state from process_actions order by seq")
        assert [(row["kind"], row["state"]) for row in rows] == [
            ("write", "applied"),
            ("read", "applied"),
            ("terminate", "applied"),
            ("read", "applied"),
        ]


# --- cancel and archive ---------------------------------------------------------------------------------------


async def test_a_cancel_takes_back_what_waits_and_lets_the_background_be(database: str) -> None:
    turns = scripted(
        [("run_command", {"command": "server"})],
        [("run_command", {"command": "granted"}), ("run_command", {"command": "queued"})],
    )
    async with engine_on(database, turns) as engine:
        agent, machine = await one_machine(engine)
        await engine.say(agent)
        server = await machine.take()
        await machine.started(server.process_id)
        granted, queued = await machine.offered(2)
        await machine.accept(granted)
        await cancel_agent(engine.replicas[0].deps, owner(engine), AgentPath(agent))
        assert not await machine.accept(queued)
        states = {row["command"]: row["state"] for row in await processes(engine, agent)}
        assert (states["server"], states["queued"]) == ("running", "failed")
        assert [encode(IdKind.PROCESS, p) for p in (await machine.pending()).terminations] == [granted.process_id]
        ack = await machine.killed(granted.process_id)
        assert ack.ack_status == "cleanup_only"
        outcomes = [outcome for outcome, _ in await results(engine, agent)]
        assert outcomes == ["succeeded", "canceled", "canceled"]
        await archive(engine.replicas[0].deps, owner(engine), AgentPath(agent))
        assert [encode(IdKind.PROCESS, p) for p in (await machine.pending()).terminations] == [server.process_id]
        assert await engine.sql.fetchval("select state from agent_machine_bindings") == "released"
        await machine.killed(server.process_id)


async def test_a_restart_takes_back_what_the_voided_calls_asked_for(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})])) as engine:
        agent, machine = await one_machine(engine)
        await engine.say(agent)
        [offer] = await machine.offered()
        await engine.until_idle(agent)
        await resume(engine.replicas[0].deps, owner(engine), AgentPath(agent), restart=True)
        await engine.until_idle(agent)
        assert not await machine.accept(offer)
        rows = await processes(engine, agent)
        assert [row["state"] for row in rows] == ["failed", "queued"]
        again = await machine.take()
        await machine.finished(again.process_id)
        await engine.until_idle(agent)
        assert (await engine.events(agent))[-1][2]["content_blocks"][0]["text"] == "done"


async def test_a_cancel_and_a_report_race(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})])) as engine:
        first, machine = await one_machine(engine)
        agents = [first, *await engine.add_agents(7, tools=ALL)]
        for agent in agents:
            if agent != first:
                await bind(engine, agent, machine.id, "mchr-aaaaaa")
            await engine.say(agent)
            offer = await machine.take()
            await asyncio.gather(
                machine.finished(offer.process_id, "x"),
                cancel_agent(engine.replicas[0].deps, owner(engine), AgentPath(agent)),
            )
        await engine.until_idle(*agents)
        for agent in agents:
            assert len(await results(engine, agent)) == 1
            [process] = await processes(engine, agent)
            assert process["state"] in ("exited", "unknown")
            assert public(process)


async def test_permission_is_asked_as_for_any_other_tool(database: str) -> None:
    async with engine_on(database, scripted([("run_command", {"command": "x"})])) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_ask"})
        await bind(engine, agent, await add_machine(engine), "mchr-aaaaaa")
        await engine.start()
        await engine.say(agent)
        await until_call(engine, agent, "run_command", "awaiting_permission")
        await engine.until_idle(agent)
        assert await processes(engine, agent) == []
        form = await engine.sql.fetchval("select id from interactions where agent_id = $1", agent)
        await resolve(engine.replicas[0].deps, owner(engine), AgentPath(agent), form, [Answer((0,))])
        await until_call(engine, agent, "run_command", "waiting")
        assert len(await processes(engine, agent)) == 1


async def test_what_was_allowed_does_not_run_on_a_machine_that_came_later(database: str) -> None:
    script = scripted([("run_command", {"command": "x"})], [("run_command", {"command": "y"})])
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_ask"})
        first = await bind(engine, agent, await add_machine(engine, "first"), "mine")
        await engine.start()

        async def allow() -> None:
            query = "select id from interactions where agent_id = $1 and state = 'open'"
            form = await engine.sql.fetchval(query, agent)
            await resolve(engine.replicas[0].deps, owner(engine), AgentPath(agent), form, [Answer((0,))])
            await engine.until_idle(agent)

        await engine.say(agent)
        await until_call(engine, agent, "run_command", "awaiting_permission")
        # Another machine gets the name of the one that was meant.
        await engine.sql.execute("delete from agent_machine_bindings where id = $1", first)
        await bind(engine, agent, await add_machine(engine, "second"), "mine")
        await allow()
        await allow()
        [(outcome, value)] = await results(engine, agent)
        assert (outcome, value["error_code"]) == ("failed", "tool_authorization_invalidated")
        [row] = await processes(engine, agent)
        assert row["command"] == "y"


async def test_what_a_tool_of_ours_gets_wrong_fails_its_call_only(database: str, monkeypatch: Any) -> None:
    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    batch: list[Request] = [("list_processes", {}), ("list_machines", {})]
    async with engine_on(database, scripted(batch)) as engine:
        agent, _ = await one_machine(engine)
        monkeypatch.setattr(machine_calls, "active_processes", broken)
        await engine.say(agent)
        await engine.until_idle(agent)
        found = await results(engine, agent)
        assert [outcome for outcome, _ in found] == ["failed", "succeeded"]
        assert found[0][1]["error_code"] == "tool_fault"
