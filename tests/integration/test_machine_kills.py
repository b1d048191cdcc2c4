"""A worker that is killed with -9 while it queues a command: at whatever point, one process, one result, none unknown.

Source: engine.md §7 (transactional tools); machines.md §14; DESIGN §2 (invariants 4 and 5).
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara import probes
from omnara.db import machine_calls
from omnara.db.failures import DatabaseUnavailable
from omnara.domain.content import TextBlock
from omnara.domain.message import AssistantMessage
from omnara.engine.cancel import cancel_agent
from omnara.engine.lifecycle import archive
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, encode
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from tests.integration.test_recovery_processes import Files, process
from tests.support.crashing import owner, step_states, terminate
from tests.support.engine import Engine, built_in, engine_on
from tests.support.hand_machine import (
    HandMachine,
    add_machine,
    add_pool,
    bind,
    call_states,
    processes,
    results,
    until_call,
)

RUN: tuple[str, dict[str, Any]] = ("run_command", {"command": "x"})


def script(call: ModelCall) -> Outcome:
    return ask(call, RUN) if len(call.context.messages()) == 1 else say("done")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """What the killed process leaves behind."""
    return Files(tmp_path)


@pytest.mark.parametrize(
    ("die_at", "dies_on"),
    [
        ("saving", 1),  # the output with the call
        ("tool_tx", 1),  # written, not committed
        ("tool_tx_committed", 1),  # committed, the step not closed
        ("saving", 2),  # the end of the step
    ],
)
async def test_killed_at_a_point(database: str, files: Files, die_at: str, dies_on: int) -> None:
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        await engine.say(agent)
        async with process(engine, files, die_at=die_at, dies_on=dies_on, asks=RUN) as child:
            async with asyncio.timeout(20):
                assert await child.wait() == -signal.SIGKILL
        [replica] = await engine.start()
        machine = HandMachine(replica.deps, machine_id)
        await machine.connect()
        offer = await machine.take()
        await machine.finished(offer.process_id, "once")
        await engine.until_idle(agent)
        [(outcome, value)] = await results(engine, agent)
        assert (outcome, value["output"]) == ("succeeded", "once")
        assert len(await processes(engine, agent)) == 1
        assert (await engine.events(agent))[-1][2]["content_blocks"][0]["text"] == "done"


async def test_the_machine_reports_while_nobody_holds_the_agent(database: str, files: Files) -> None:
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        await engine.say(agent)
        async with process(engine, files, die_at="tool_tx_committed", asks=RUN) as child:
            async with asyncio.timeout(20):
                assert await child.wait() == -signal.SIGKILL
        [replica] = await engine.start(claim_sweep_s=5.0, death_grace_s=2.0)
        machine = HandMachine(replica.deps, machine_id)
        await machine.connect()
        offer = await machine.take()
        await machine.finished(offer.process_id, "early")  # the dead worker's claim still stands, perhaps
        await engine.until_idle(agent)
        assert [value["output"] for _, value in await results(engine, agent)] == ["early"]


async def test_a_commit_of_unknown_outcome_is_found_out(database: str) -> None:
    cut = asyncio.Event()
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        [replica] = await engine.start()

        def break_it(point: probes.Point) -> None:
            if point.name == "tool_tx_committed" and not cut.is_set():
                cut.set()
                raise DatabaseUnavailable

        with probes.attach(break_it):
            await engine.say(agent)
            await cut.wait()
            machine = HandMachine(replica.deps, machine_id)
            await machine.connect()
            offer = await machine.take()
            await machine.finished(offer.process_id)
            await engine.until_idle(agent)
        assert len(await processes(engine, agent)) == 1
        assert len(await results(engine, agent)) == 1


@pytest.mark.parametrize("committed", [False, True])
async def test_what_runs_outside_is_done_once_while_the_database_fails_the_others_of_its_batch(
    database: str, committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first of the others has happened, and nobody could hear of it."""
    ran: list[UUID] = []
    away = asyncio.Event()
    real = machine_calls.lock_claimed

    async def look(call: ToolCallRequest) -> ToolResult:
        ran.append(call.id)
        away.clear()
        return succeeded(TextBlock("looked"))

    async def lock_claimed(*args: Any) -> Any:
        if away.is_set():
            raise DatabaseUnavailable
        return await real(*args)

    def break_it(point: probes.Point) -> None:
        if point.name == ("tool_tx_committed" if committed else "tool_tx") and not ran:
            away.set()
            raise DatabaseUnavailable

    def asks(call: ModelCall) -> Outcome:
        batch: tuple[tuple[str, dict[str, Any]], ...] = (
            ("outside", {}),
            ("list_processes", {}),
            ("run_command", {"command": "make"}),
            ("outside", {}),
        )
        return ask(call, *batch) if len(call.context.messages()) == 1 else say("done")

    monkeypatch.setattr(machine_calls, "lock_claimed", lock_claimed)
    with built_in("outside", look), probes.attach(break_it):
        async with engine_on(database, asks) as engine:
            tools = dict.fromkeys(("outside", "list_processes", "run_command"), "always_allow")
            [agent] = await engine.add_agents(tools=tools)
            machine_id = await add_machine(engine)
            await bind(engine, agent, machine_id, "mchr-aaaaaa")
            [replica] = await engine.start()
            await engine.say(agent)
            machine = HandMachine(replica.deps, machine_id)
            await machine.connect()
            offer = await machine.take()
            await machine.finished(offer.process_id)
            await engine.until_idle(agent)
            assert len(ran) == len(set(ran)) == 2
            assert [outcome for outcome, _ in await results(engine, agent)] == ["succeeded"] * 4
            assert len(await processes(engine, agent)) == 1
            assert set(await step_states(engine, agent)) == {"succeeded"}


async def test_a_connection_lost_in_the_transaction_is_no_loss(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine_calls.insert_process
    cuts: list[int] = []
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        await bind(engine, agent, await add_machine(engine), "mchr-aaaaaa")

        async def insert(connection: Any, new: Any, *, most: int) -> bool:
            queued = await real(connection, new, most=most)
            if not cuts:
                cuts.append(await terminate(engine, "api"))
            return queued

        monkeypatch.setattr(machine_calls, "insert_process", insert)
        with probes.expect("tool_tx_committed", agent_id=agent) as committed:
            await engine.start()
            await engine.say(agent)
            await committed.wait()
        await engine.until_idle(agent)
        assert len(cuts) == 1
        assert cuts[0] > 0
        assert len(await processes(engine, agent)) == 1
        assert await step_states(engine, agent) == ["succeeded", "succeeded"]


# --- races ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "archive"])
async def test_a_claim_that_is_taken_before_the_transaction_queues_nothing(
    database: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_on(database, script) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        await bind(engine, agent, await add_machine(engine), "mchr-aaaaaa")
        [replica] = await engine.start()
        real = machine_calls.lock_claimed

        async def late(*args: Any) -> Any:
            monkeypatch.setattr(machine_calls, "lock_claimed", real)
            await asyncio.create_task(stop(engine, replica.deps, agent, way))
            return await real(*args)

        monkeypatch.setattr(machine_calls, "lock_claimed", late)
        await engine.say(agent)
        await until_call(engine, agent, "run_command", "completed")
        await engine.until_idle(agent)
        assert await processes(engine, agent) == []
        assert [outcome for outcome, _ in await results(engine, agent)] == ["canceled"]
        assert "succeeded" in await step_states(engine, agent)


async def stop(engine: Engine, deps: Any, agent: Any, way: str) -> None:
    """Cancel or archive an agent, as a person does."""
    if way == "cancel":
        await cancel_agent(deps, owner(engine), AgentPath(agent))
    else:
        await archive(deps, owner(engine), AgentPath(agent))


async def test_many_agents_queue_and_are_canceled_at_once(database: str) -> None:
    async with engine_on(database, script) as engine:
        agents = await engine.add_agents(12, tools={"run_command": "always_allow"})
        machine_id = await add_machine(engine)
        for agent in agents:
            await bind(engine, agent, machine_id, "mchr-aaaaaa")
        [replica, _] = await engine.start(2)
        for agent in agents:
            await engine.say(agent)
        await asyncio.gather(*(stop(engine, replica.deps, agent, "archive") for agent in agents[::2]))
        machine = HandMachine(replica.deps, machine_id)
        await machine.connect()
        for _ in agents[1::2]:
            offer = await machine.take()
            await machine.finished(offer.process_id)
        await engine.until_idle(*agents[1::2])
        for agent in agents:
            states = (await call_states(engine, agent)).get("run_command", [])
            assert states in ([], ["completed"])
            assert len(await processes(engine, agent)) <= 1
        for agent in agents[1::2]:
            assert [outcome for outcome, _ in await results(engine, agent)] == ["succeeded"]


# --- machines of pools ------------------------------------------------------------------------------------


def turns(*batches: list[tuple[str, dict[str, Any]]]) -> Any:
    """A model that asks for each batch, and then is done."""

    def play(call: ModelCall) -> Outcome:
        asked = sum(isinstance(message, AssistantMessage) for message in call.context.messages())
        return ask(call, *batches[asked]) if asked < len(batches) else say("done")

    return play


async def test_an_agent_without_machines_gets_one_at_its_first_command(database: str) -> None:
    async with engine_on(database, turns([RUN, RUN], [("list_machines", {})])) as engine:
        tools = dict.fromkeys(("run_command", "list_machines"), "always_allow")
        agents = await engine.add_agents(3, tools=tools)
        await engine.start()
        for agent in agents:
            await engine.say(agent)
        await engine.until_idle(*agents)
        machines = await engine.sql.fetch("select * from machines")
        assert len(machines) == 3
        assert {(m["provider"], m["lifecycle_state"], m["source_kind"]) for m in machines} == {
            ("docker", "provisioning", "pool")
        }
        assert await engine.sql.fetchval("select count(*) from machine_pools where management_kind = 'cluster'") == 1
        for agent in agents:
            assert [row["state"] for row in await processes(engine, agent)] == ["queued", "queued"]
        await archive(engine.replicas[0].deps, owner(engine), AgentPath(agents[0]))
        states = await engine.sql.fetch("select lifecycle_state from machines order by lifecycle_state")
        assert [row[0] for row in states] == ["deleting", "provisioning", "provisioning"]


async def test_a_sandbox_that_is_being_deleted_gets_a_successor(database: str) -> None:
    async with engine_on(database, turns([RUN], [])) as engine:
        [agent] = await engine.add_agents(tools={"run_command": "always_allow"})
        [replica] = await engine.start()
        await engine.say(agent)
        await until_call(engine, agent, "run_command", "waiting")
        await engine.until_idle(agent)
        await engine.sql.execute("update machines set lifecycle_state = 'deleting', lifecycle_version = 2")
        await stop(engine, replica.deps, agent, "cancel")
        engine.script = turns([], [RUN])
        await engine.say(agent)
        await engine.until_idle(agent)
        rows = await processes(engine, agent)
        assert [row["state"] for row in rows] == ["failed", "queued"]
        assert rows[0]["machine_id"] != rows[1]["machine_id"]


async def test_machines_are_made_and_given_up_by_tools(database: str) -> None:
    batch = turns(
        [("create_machine", {}), ("create_machine", {"pool": "pool"}), ("create_machine", {})],
        [("list_machines", {}), ("delete_machine", {}), ("run_command", {"command": "x"})],
    )
    async with engine_on(database, batch) as engine:
        pool_id = await add_pool(engine)
        [agent] = await engine.add_agents(
            tools=dict.fromkeys(("create_machine", "delete_machine", "list_machines", "run_command"), "always_allow")
        )
        await with_pool(engine, agent, pool_id, most=2)
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        found = [value for _, value in await results(engine, agent)]
        assert [value.get("state") for value in found[:2]] == ["provisioning", "provisioning"]
        assert found[2]["error_code"] == "machine_capacity_reached"
        assert len(found[3]["machines"]) == 2
        assert found[3]["pools"][0]["max_machines"] == 2
        assert [value["error_code"] for value in found[4:]] == ["machine_selection_required"] * 2


async def test_a_machine_is_given_up_with_the_command_that_waits_for_it(database: str) -> None:
    batch = turns([("create_machine", {})], [("run_command", {"command": "x"}), ("delete_machine", {})])
    async with engine_on(database, batch) as engine:
        pool_id = await add_pool(engine)
        names = ("create_machine", "delete_machine", "run_command")
        [agent] = await engine.add_agents(tools=dict.fromkeys(names, "always_allow"))
        await with_pool(engine, agent, pool_id, most=1)
        await engine.start()
        await engine.say(agent)
        await engine.until_idle(agent)
        outcomes = {value.get("error_code", value.get("state")) for _, value in await results(engine, agent)}
        assert outcomes == {"provisioning", "machine_binding_released", "deleting"}
        assert [row["state"] for row in await processes(engine, agent)] == ["failed"]
        assert await engine.sql.fetchval("select lifecycle_state from machines") == "deleting"
        assert (await engine.events(agent))[-1][2]["content_blocks"][0]["text"] == "done"


async def with_pool(engine: Engine, agent: Any, pool_id: Any, *, most: int) -> None:
    """Add a pool to the config of an agent, as the compiler writes it."""
    sources = [{"source": "pool", "pool_id": encode(IdKind.MACHINE_POOL, pool_id), "max_machines": most}]
    await engine.sql.execute(
        """update agent_configs set definition = (definition::jsonb || jsonb_build_object('machine_sources', $2::jsonb))
             ::json
           where id = (select current_config_id from agents where id = $1)""",
        agent,
        msgspec.json.encode(sources).decode(),
    )
