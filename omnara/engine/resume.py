"""Letting an agent go on: after a pause, or after a crash at an operator's word.

A crashed agent is never resumed by itself. `force` goes on from the last valid step: damaged rows, and the steps that
cannot be told without them, are voided. `restart` goes back to the last message. Rows are never removed: the fold skips
void ranges, and what the hot row says is computed anew from what is left.
Source: DESIGN §4 (void ranges and the two ways on).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction
from omnara.db import agents, calls, interactions, reads, snapshot
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.domain.content import INTERRUPTED_TEXT, StructuredDataBlock, TextBlock
from omnara.domain.events import AgentInputPayload, DamagedEvent, Event, ModelOutputPayload
from omnara.domain.state import LogState, fold
from omnara.engine.appending import Appending
from omnara.engine.cancel import at_machines
from omnara.engine.deps import Deps, announce
from omnara.engine.machines.closing import cancel_calls
from omnara.engine.scope import AgentPath, locate
from omnara.errors import Conflict, StateTransitionConflict

PAGE: Final = 1000
VOIDED: Final = "voided"
"""Structured reason of the results that close the calls of a voided step."""

Range = tuple[int, int]


class Resumed(msgspec.Struct, frozen=True):
    """The agent, and the half-open ranges of sequences that this resume voided."""

    agent_id: UUID
    voided: tuple[Range, ...] = ()


async def resume(deps: Deps, p: Principal, path: AgentPath, *, force: bool = False, restart: bool = False) -> Resumed:
    """Open the gate of a paused agent, or (with `force` or `restart`) of a crashed one. Own transaction.

    An open agent stays as it is, unless `restart` is given, which also takes a running step away. Raises NotFound,
    Forbidden, StateTransitionConflict (archived; crashed without `force` or `restart`, with the diagnosis), Conflict
    (nothing to restart from).
    """

    async def work(connection: Connection) -> tuple[Resumed, bool, bool]:
        agent = await locate(connection, p, path, ProjectAction.OPERATE)
        appending = await Appending.lock(connection, agent.id)
        hot = appending.hot
        if hot.gate == "archived":
            raise StateTransitionConflict("the agent is archived")
        if hot.gate == "crashed" and not (force or restart):
            raise StateTransitionConflict(f"the agent is crashed: {await diagnose(connection, agent.id)}")
        if hot.gate == "open" and not restart:
            return Resumed(agent.id), False, False
        if hot.gate == "crashed" or restart:
            return await _mend(connection, appending, restart=restart), True, hot.worker_id is not None
        hot.gate = "open"
        await appending.write("wake")
        return Resumed(agent.id), False, False

    resumed, mended, taken = await deps.db.run(work)
    announce(deps, resumed.agent_id, events=mended, ready=True, taken=taken)
    return resumed


async def diagnose(connection: Connection, agent_id: UUID) -> str:
    """Say in one sentence why an agent is crashed."""
    deaths, error = await reads.diagnosis(connection, agent_id)
    if deaths:
        return f"{deaths} workers in a row died while they ran its step"
    return f"its last step failed with {error}" if error else "its history could not be read"


async def _mend(connection: Connection, appending: Appending, *, restart: bool) -> Resumed:
    hot = appending.hot
    log = await _Log.read(connection, hot.agent_id)
    ranges = await log.damage_with_its_steps(connection)
    if hot.gate == "crashed":
        ranges += log.crash_notice()
    if restart:
        ranges += log.after_last_message(hot.next_sequence)
    state = fold(event for event in log.events if not _within(event.sequence, ranges))
    ranges += await _close_calls(connection, appending, state)
    ranges = _merged(ranges)
    if ranges:
        await agents.add_void(connection, hot.agent_id, ranges)
    await agents.cancel_started_step(connection, hot.agent_id, hot.step_number)
    taken = hot.worker_id is not None
    hot.gate = "open"
    hot.deaths = 0
    hot.attempt = 0
    hot.retry_at = None
    hot.history_version += 1
    hot.turn_open = state.turn_open
    await appending.write("wake", release=taken)
    return Resumed(hot.agent_id, tuple(ranges))


async def _close_calls(connection: Connection, appending: Appending, state: LogState) -> list[Range]:
    """Give every call that can no longer be answered its one result; return the ranges of those to be voided.

    Calls of voided outputs end as canceled, inside the void. A call of the batch that stays, marked as running though
    nobody runs it, ends as interrupted: its effect may have happened. Source: DESIGN §2, invariant 4.
    """
    hot = appending.hot
    open_calls = await calls.all_open_calls(connection, hot.agent_id)
    kept = [call for call in open_calls if call.output_sequence == state.batch_sequence]
    dropped = [call for call in open_calls if call.output_sequence != state.batch_sequence]
    hot.batch_sequence = state.batch_sequence if kept else None
    hot.open_calls = len(kept)
    interrupted = [call for call in kept if call.state == "running"]
    for call in interrupted:
        appending.add_result(call, "failed", [TextBlock(INTERRUPTED_TEXT)])
    await cancel_calls(connection, hot.agent_id, at_machines([*interrupted, *dropped]))
    if not dropped:
        return []
    first = hot.next_sequence
    for call in dropped:
        appending.add_result(call, "canceled", [StructuredDataBlock({"reason": VOIDED})])
    await _cancel_forms(connection, hot.agent_id, dropped)
    return [(first, hot.next_sequence)]


async def _cancel_forms(connection: Connection, agent_id: UUID, dropped: Sequence[CallRow]) -> None:
    await interactions.cancel(connection, agent_id, calls=[call.id for call in dropped], input_id=None, reason=VOIDED)


class _Log:
    """The readable events of an agent outside its void ranges, and the sequences of those that cannot be read."""

    def __init__(self, agent_id: UUID, events: list[Event], damaged: list[int]) -> None:
        self._agent_id = agent_id
        self.events = events
        self._damaged = damaged

    @classmethod
    async def read(cls, connection: Connection, agent_id: UUID) -> _Log:
        """Read the whole log of a locked agent, in pages."""
        void = await agents.void_ranges(connection, agent_id)
        events: list[Event] = []
        damaged: list[int] = []
        following = 1
        while True:
            rows = await snapshot.read_events(connection, agent_id, following, PAGE)
            for row in rows:
                if _within(row["sequence"], void):
                    continue
                try:
                    events.append(snapshot.decode_event(row))
                except DamagedEvent:
                    damaged.append(row["sequence"])
            if len(rows) < PAGE:
                return cls(agent_id, events, damaged)
            following = rows[-1]["sequence"] + 1

    async def damage_with_its_steps(self, connection: Connection) -> list[Range]:
        """Ranges of the damaged events, each with the whole of its step: half a step is worse than none."""
        if not self._damaged:
            return []
        sequences = set(self._damaged)
        for output, result in await calls.batches_of(connection, self._agent_id, self._damaged):
            sequences.add(output)
            if result is not None:
                sequences.add(result)
        return [(sequence, sequence + 1) for sequence in sorted(sequences)]

    def crash_notice(self) -> list[Range]:
        """The error output that told readers of the crash, when it is the last thing that a model could have said."""
        for event in reversed(self.events):
            payload = event.payload
            if isinstance(payload, AgentInputPayload) and payload.input_kind != "content":
                continue
            if isinstance(payload, ModelOutputPayload) and payload.stop_reason == "error":
                return [(event.sequence, event.sequence + 1)]
            return []
        return []

    def after_last_message(self, end: int) -> list[Range]:
        """Everything after the last message that can be read. Raises Conflict when there is none."""
        for event in reversed(self.events):
            if isinstance(event.payload, AgentInputPayload) and event.payload.input_kind == "content":
                return [(event.sequence + 1, end)] if event.sequence + 1 < end else []
        raise Conflict("there is no message to restart from")


def _within(sequence: int, ranges: Sequence[Range]) -> bool:
    return any(first <= sequence < until for first, until in ranges)


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, until in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((first, until))
    return merged
