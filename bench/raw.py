"""The bare loop: the engine's saving statement, one agent at a time, on twelve connections and nothing around it.

This is what `ratio_raw` divides by. Rows and bytes are those of the engine, because they are made by its own
functions; but they are made once, and each save only replaces what must be new (ids and step numbers), so the loop
costs as little Python as it can. Source: DESIGN §9.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from bench.seed import Seeded
from bench.workload import ARGUMENTS, RESULT, TEXT, TOOL
from omnara.db.advance import WHOLE, statement_for
from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.domain.advance import Advance
from omnara.domain.claim import Claim
from omnara.domain.content import TextBlock
from omnara.engine.model_step import Begun, Next, accept_output, begin_model, begin_tools, save_output
from omnara.engine.plan import StepPlan, ToolPolicy
from omnara.engine.tool_step import Finished, RunningCall, ToolsBegun, save_results
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.protocol import Completed, ModelTarget, RequestedCall
from omnara.tools.protocol import succeeded

__all__ = ["RawContestant", "Slots", "agent_claim", "saves_of"]

CONNECTIONS: Final = 12
TOKEN: Final = 7
_STEP: Final = 2_000_000_003
"""A step number that occurs nowhere else among the parameters, so that its places can be found: what is closed, and
the fence, which knows the step that its holder is at."""


class Slots(msgspec.Struct, frozen=True):
    """One statement's parameters and the places that change from save to save."""

    parameters: list[Any]
    steps: tuple[int, ...]
    event: int
    call: int
    begins: int

    def filled(self, step: int, call: UUID) -> list[Any]:
        """Return parameters for one save: a new event, this step, and the call that it makes or answers."""
        values = list(self.parameters)
        for place in self.steps:
            values[place] = [step]
        values[self.event] = [new_uuid()]
        values[self.call] = [call]
        if self.begins >= 0:
            values[self.begins] = [new_uuid()]
        return values


def agent_claim(agent_id: UUID, seeded: Seeded, turn_id: UUID) -> Claim:
    """The claim of an agent in the middle of its first turn."""
    return Claim(
        agent_id=agent_id,
        project_id=seeded.project_id,
        claim_token=TOKEN,
        epoch=1,
        waited_s=0.0,
        next_sequence=2,
        inputs_gen=0,
        turn_id=turn_id,
        turn_sequence=1,
        turn_open=True,
        batch_sequence=None,
        open_calls=0,
        attempt=0,
        step_number=_STEP,
        deaths=0,
        history_version=0,
        void=(),
        config_id=seeded.config_id,
        retry_in_s=None,
    )


def saves_of(claim: Claim, seeded: Seeded, worker_id: UUID) -> tuple[Slots, Slots]:
    """Return the saves of a model step and of a tools step of this agent, each beginning the other one."""
    target = ModelTarget(
        revision_id=encode(IdKind.MODEL_REVISION, seeded.revision_id),
        provider="bench",
        api_format="openai_chat_completions",
        slug="bench",
    )
    policies = {TOOL.name: ToolPolicy(TOOL, "always_allow")}
    plan = StepPlan(seeded.config_id, seeded.revision_id, target, "", (), policies)
    assert claim.turn_id is not None
    call_id = new_uuid()
    public = encode(IdKind.TOOL_CALL, call_id)
    asked = RequestedCall(call_id, public, public, TOOL.name, ARGUMENTS)
    done = Completed("tool_use", (TextBlock(TEXT), asked))
    begun = Begun(new_uuid(), claim.turn_id, claim.turn_sequence, _STEP, 1, 1)
    output = accept_output(begun, plan, done)
    usage = msgspec.json.encode(done.usage).decode()
    model = save_output(claim, begun, output, usage, Next("tools", begin_tools(claim, plan)))
    opened = ToolsBegun(claim.turn_id, 1, _STEP, (RunningCall(call_id, TOOL.name, ARGUMENTS),))
    finished = [Finished(opened.calls[0], succeeded(TextBlock(RESULT)))]
    tools = save_results(claim, opened, finished, Next("model", begin_model(claim, plan, (), 1)))
    return _slots(model, worker_id, call_id), _slots(tools, worker_id, call_id)


def _slots(item: Advance, worker_id: UUID, call_id: UUID) -> Slots:
    assert statement_for([item]) is WHOLE
    parameters = WHOLE.parameters(worker_id, [item])
    begins = item.begin.call_id if item.begin is not None else None
    return Slots(
        parameters,
        steps=tuple(place for place, value in enumerate(parameters) if value == [_STEP]),
        event=parameters.index([item.events[0].id]),
        call=parameters.index([call_id]),
        begins=-1 if begins is None else parameters.index([begins]),
    )


class RawContestant:
    """256 claimed agents, shared out over the connections; each connection saves for one of its agents at a time."""

    def __init__(self) -> None:
        self._connections: list[Any] = []
        self._agents: list[_Agent] = []

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Claim the seeded agents by hand. `spec`: dsn, seeded."""
        seeded = msgspec.convert(spec["seeded"], Seeded)
        worker_id = new_uuid()
        settings = ConnectSettings(dsn=spec["dsn"])
        self._connections = [await connect(settings, ConnKind.SAVER) for _ in range(CONNECTIONS)]
        turns = {agent_id: new_uuid() for agent_id in seeded.agents}
        await _claim_all(self._connections[0], seeded, worker_id, turns)
        for agent_id, turn_id in turns.items():
            model, tools = saves_of(agent_claim(agent_id, seeded, turn_id), seeded, worker_id)
            self._agents.append(_Agent(model, tools))
        return {}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`run` for some seconds, or `finish`."""
        if what == "finish":
            return {"saved": sum(agent.saved for agent in self._agents)}
        if what != "run":
            raise ValueError(f"unknown request {what!r}")
        cpu, begun = time.process_time(), time.monotonic()
        until = begun + float(values["seconds"])
        shares = [self._agents[first::CONNECTIONS] for first in range(CONNECTIONS)]
        counts = await asyncio.gather(
            *(_save_until(conn, share, until) for conn, share in zip(self._connections, shares, strict=True) if share)
        )
        took = time.monotonic() - begun
        return {"steps": sum(counts), "seconds": took, "cpu_s": time.process_time() - cpu}

    async def stop(self) -> None:
        """Close the connections."""
        for conn in self._connections:
            await conn.close()


class _Agent:
    __slots__ = ("call", "model", "saved", "step", "tools")

    def __init__(self, model: Slots, tools: Slots) -> None:
        self.model = model
        self.tools = tools
        self.step = 1
        self.call = new_uuid()
        self.saved = 0

    def next_save(self) -> list[Any]:
        if self.step % 2:
            self.call = new_uuid()
            return self.model.filled(self.step, self.call)
        return self.tools.filled(self.step, self.call)


async def _save_until(conn: Any, agents: Sequence[_Agent], until: float) -> int:
    statement = await conn.prepare(WHOLE.text)
    count = 0
    while True:
        for agent in agents:
            if time.monotonic() >= until:
                return count
            rows = await statement.fetch(*agent.next_save())
            if len(rows) != 1 or not rows[0][1]:
                raise RuntimeError("a bare save was refused by its fence")
            agent.step += 1
            agent.saved += 1
            count += 1


async def _claim_all(conn: Any, seeded: Seeded, worker_id: UUID, turns: dict[UUID, UUID]) -> None:
    """Put every agent into its first model step: claimed, one event in the log, the step open."""
    async with conn.transaction():
        await conn.executemany(
            "update agent_sched set worker_id = $2, claim_token = $3, epoch = 1, ready_at = null, next_sequence = 2, "
            "turn_id = $4, turn_sequence = 1, turn_open = true, step_number = 1 where agent_id = $1",
            [(agent, worker_id, TOKEN, turn) for agent, turn in turns.items()],
        )
        await conn.executemany(
            "insert into steps (agent_id, number, kind, attempt, frontier, call_id, turn_id, config_id, worker_id, "
            "epoch) values ($1, 1, 'model', 1, 1, $2, $3, $4, $5, 1)",
            [(agent, new_uuid(), turn, seeded.config_id, worker_id) for agent, turn in turns.items()],
        )
