"""A file on its way whose call ends early: its process ends with it, its pieces go, and late reports change nothing.

Source: machines.md §4 (agent cancel); features.md (upload and download tools); DESIGN §2 (invariants 4 and 5).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest

from omnara.engine.cancel import cancel_agent
from omnara.engine.lifecycle import archive
from omnara.engine.machines.files import AgentMachineFiles
from omnara.engine.recovery import release_claim
from omnara.engine.scope import AgentPath
from omnara.ids import IdKind, decode
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from tests.support.crashing import owner
from tests.support.engine import Engine, engine_on
from tests.support.hand_machine import HandMachine, add_machine, bind, processes
from tests.support.waiting import until


def asks(call: ModelCall) -> Outcome:
    """One upload, and no second one."""
    return ask(call, ("upload_file", {"path": "notes"})) if len(call.context.messages()) == 1 else say("done")


@contextlib.asynccontextmanager
async def uploading(database: str) -> AsyncIterator[tuple[Engine, UUID, HandMachine]]:
    """An agent that uploads a file from a machine that does nothing by itself."""
    async with engine_on(database, asks) as engine:
        [agent] = await engine.add_agents(tools={"upload_file": "always_allow"})
        machine_id = await add_machine(engine)
        await bind(engine, agent, machine_id, "mchr-aaaaaa")
        [replica] = await engine.start(reconcile_s=0.2)
        replica.worker.tools = msgspec.structs.replace(
            replica.worker.tools, machine_files=AgentMachineFiles(replica.deps)
        )
        machine = HandMachine(replica.deps, machine_id)
        await machine.connect()
        await engine.say(agent)
        yield engine, agent, machine


async def end_call(engine: Engine, agent: UUID, way: str) -> None:
    """End the call as a person does, or as whoever finds that its step must be given up."""
    [replica] = engine.replicas
    if way == "cancel":
        await cancel_agent(replica.deps, owner(engine), AgentPath(agent))
    elif way == "archive":
        await archive(replica.deps, owner(engine), AgentPath(agent))
    else:
        entry = replica.worker._runs.get(agent)
        assert entry is not None
        assert await release_claim(replica.deps, entry[0].claim, replica.worker.worker_id)


async def until_told(engine: Engine, agent: UUID, way: str) -> None:
    """The one result of the call."""
    await engine.until_idle(agent)
    kinds = [payload for _, kind, payload in await engine.events(agent) if kind == "tool_result"]
    assert [payload["outcome"] for payload in kinds] == ["failed" if way == "interrupt" else "canceled"]


@pytest.mark.parametrize("way", ["cancel", "interrupt"])
async def test_what_no_machine_has_taken_never_runs(database: str, way: str) -> None:
    async with uploading(database) as (engine, agent, machine):
        [offer] = await machine.offered()
        await end_call(engine, agent, way)
        assert not await machine.accept(offer)
        await until_told(engine, agent, way)
        [row] = await processes(engine, agent)
        assert (row["state"], row["terminate_requested"]) == ("failed", None)


@pytest.mark.parametrize("way", ["cancel", "archive", "interrupt"])
async def test_what_runs_is_ended_and_its_late_report_changes_nothing(database: str, way: str) -> None:
    async with uploading(database) as (engine, agent, machine):
        offer = await machine.take()
        await machine.started(offer.process_id)
        assert (await machine.pending()).terminations == []
        await end_call(engine, agent, way)
        await until_told(engine, agent, way)
        assert (await machine.pending()).terminations == [decode(IdKind.PROCESS, offer.process_id)]
        assert (await machine.killed(offer.process_id)).ack_status == "cleanup_only"
        [row] = await processes(engine, agent)
        assert (row["state"], row["reason_code"]) == ("killed", "terminate_requested")
        await until_told(engine, agent, way)


async def test_an_end_that_was_already_on_its_way_counts_for_nothing_either(database: str) -> None:
    async with uploading(database) as (engine, agent, machine):
        offer = await machine.take()
        await machine.started(offer.process_id)
        await end_call(engine, agent, "cancel")
        assert (await machine.finished(offer.process_id, f"{3:<64}YWJj")).ack_status == "cleanup_only"
        await until_told(engine, agent, "cancel")
        assert [row["state"] for row in await processes(engine, agent)] == ["exited"]
        assert await engine.sql.fetchval("select count(*) from artifacts") == 0


@pytest.mark.parametrize("way", ["cancel", "interrupt"])
async def test_pieces_of_the_file_do_not_stay(database: str, way: str) -> None:
    async with uploading(database) as (engine, agent, machine):
        offer = await machine.take()
        await machine.started(offer.process_id)
        await machine.finished(offer.process_id, f"{3:<64}YWJj")
        read = await machine.take_action()
        await end_call(engine, agent, way)
        await until_told(engine, agent, way)
        late = await machine.applied(read, f"{3:<64}", 0)
        assert late.ack_status == "cleanup_only"
        await until(lambda: not engine.replicas[0].worker.running, "nobody works on it")
        assert await pieces(engine) == [("failed", {}, None)]
        assert (await machine.pending()).actions == []


async def pieces(engine: Engine) -> list[Any]:
    """What is left of the actions."""
    rows = await engine.sql.fetch("select state, payload, result from process_actions")
    return [(row["state"], msgspec.json.decode(row["payload"]), row["result"]) for row in rows]
