"""Results for calls that wait for machines: told once, under the lock of their agent, and announced after the commit.

Reports, registrations, sweeps, cancels and deletions all end here, so "exactly one result" has one place: a call gets
one only if it still waits. Source: DESIGN §2, invariant 5; engine.md §7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import processes as db
from omnara.db.agents import HotRow, NewEventRow
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.process_ends import EndedAction, EndedProcess
from omnara.domain.content import StructuredDataBlock
from omnara.domain.events import Outcome
from omnara.domain.processes import LIVE, action_result, failure
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.deps import Deps

_NOTHING: Final[Mapping[UUID, dict[str, str]]] = {}


class Result(msgspec.Struct, frozen=True):
    """What a waiting call is told."""

    call_id: UUID
    outcome: Outcome
    value: dict[str, Any]


@dataclass(slots=True)
class Told:
    """What a transaction did, to be announced after its commit and not if it is rolled back."""

    agents: set[UUID] = field(default_factory=set)
    machines: set[UUID] = field(default_factory=set)
    calls: list[CallRow] = field(default_factory=list)

    def tell(self, deps: Deps) -> None:
        """Announce. Call once, after the commit."""
        for call in self.calls:
            deps.feed.tool_call(call.agent_id, call.id, call.state)
        for agent_id in self.agents:
            deps.feed.wake(agent_id)
        if self.agents:
            deps.hints.events(self.agents)
            deps.hints.ready(self.agents)
        if self.machines:
            deps.hints.machines(self.machines)


class Added(msgspec.Struct, frozen=True):
    """A result that was added to an agent's log, and the call that it completes."""

    call: CallRow
    outcome: Outcome
    event: NewEventRow


async def add_results(connection: Connection, appending: Appending, results: Sequence[Result]) -> list[Added]:
    """Add results for those of these calls that still wait; return these. The caller writes `appending`."""
    if not results:
        return []
    by_call = {result.call_id: result for result in results}
    waiting = await db.waiting_calls(connection, appending.hot.agent_id, by_call)
    return [add_result(appending, call, by_call[call.id]) for call in waiting]


def add_result(appending: Appending, call: CallRow, result: Result) -> Added:
    """Add the result of a call that waits; the caller has it locked, and writes `appending`."""
    event = appending.add_result(call, result.outcome, [StructuredDataBlock(result.value)])
    return Added(call, result.outcome, event)


async def settle(
    connection: Connection, hot_rows: Mapping[UUID, HotRow], results: Mapping[UUID, Sequence[Result]], told: Told
) -> None:
    """Give results to waiting calls of locked agents, and wake whoever has none left. Three statements per agent."""
    for agent_id, wanted in results.items():
        appending = Appending(connection, hot_rows[agent_id])
        if await add_results(connection, appending, wanted):
            await appending.write(wake_if_runnable(appending.hot))
            told.agents.add(agent_id)
            told.calls += appending.completed


def results_of(
    processes: Iterable[EndedProcess],
    actions: Iterable[EndedAction] = (),
    *,
    message: str = "",
    about: Mapping[UUID, dict[str, str]] = _NOTHING,
) -> dict[UUID, list[Result]]:
    """Return what the calls behind ended processes and actions are told, by agent; with `message` instead of our words.

    `about`: what failures say of a machine beside, or instead of, the rest. A process that only is to end, and lives on
    for the moment, has nothing to tell yet.
    """
    found: dict[UUID, list[Result]] = defaultdict(list)
    for process in processes:
        if process.tool_call_id is not None and process.state not in LIVE:
            value = failure(process.reason_code, message=message, process_id=process.id, state=process.state)
            value |= about.get(process.machine_id, {})
            found[process.agent_id].append(Result(process.tool_call_id, "failed", value))
    for action in actions:
        if action.tool_call_id is None:
            continue
        if action.state == "applied":
            done = action_result(action.process_id, action.process_state, action.kind)
            found[action.agent_id].append(Result(action.tool_call_id, "succeeded", done))
        else:
            value = failure(
                action.reason_code, message=message, process_id=action.process_id, state=action.process_state
            ) | about.get(action.machine_id, {})
            found[action.agent_id].append(Result(action.tool_call_id, "failed", value))
    return found
