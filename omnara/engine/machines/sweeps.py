"""What no machine will ever say: that it is out of reach, never took what was offered, or forgot what it took.

Bounded rounds that wait for no lock: an agent or a process that somebody works on is looked at again in a second. What
counts is the database's clock alone. After Postgres was away, or this process was cut off from it, machines first get
the time to be heard again. Source: machines.md §4 (timers), §14 rows 6 and 25; coordination §1.4, §9.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal
from uuid import UUID

import msgspec

from omnara.clock import monotonic
from omnara.db import process_ends as ends
from omnara.db import processes as db
from omnara.db import runtimes
from omnara.db.agents import HotRow
from omnara.db.connection import Connection
from omnara.db.process_ends import EndedAction, EndedProcess, Ending, Waiting
from omnara.domain.processes import failure
from omnara.engine.deps import Deps
from omnara.engine.machines.completing import Result, Told, results_of, settle
from omnara.engine.machines.unmade import about_unmade
from omnara.log import get_logger

log = get_logger(__name__)

BATCH: Final = 200
"""Processes, and actions, that one transaction ends."""

UNREACHABLE: Final = "machine_unreachable"
NOT_REPORTED: Final = "process_not_reported"
NOT_ACCEPTED: Final = "process_not_accepted"
ACTION_NOT_ACCEPTED: Final = "process_action_not_accepted"


Find = Callable[..., Awaitable[list[Waiting]]]
"""Finds what has waited so many seconds: `(connection, seconds, limit, among)`."""


class Swept(msgspec.Struct, frozen=True):
    """How many runtimes fell silent for good, and how much work was ended: nobody answers, takes it or speaks of it."""

    runtimes: int = 0
    unreachable: int = 0
    overdue: int = 0
    silent: int = 0


class Sweeper:
    """Sweeps once per call. Keeps in mind only when it last could, so that an outage of ours is not a machine's:

    after a start, and whenever nothing could be swept for a lease, machines have one grace to be heard again.
    """

    def __init__(self, deps: Deps, *, clock: Callable[[], float] = monotonic) -> None:
        self._deps = deps
        self._clock = clock
        self._last: float | None = None
        self._hold_until = float("-inf")

    async def sweep(self) -> Swept:
        """Sweep once: at most one batch of each kind. Raises Unavailable."""
        now, settings = self._clock(), self._deps.settings
        if self._last is None or now - self._last > settings.machine_lease_s:
            self._hold_until = now + settings.machine_grace_s
        if now < self._hold_until:
            found = Swept(overdue=await _overdue(self._deps))
        else:
            found = await sweep(self._deps)
        self._last = self._clock()
        return found


async def sweep(deps: Deps) -> Swept:
    """Look once for everything whose time ran out; up to one batch of each kind. Own transactions, then announced.

    Safe in every process at once. Raises Unavailable.
    """
    settings = deps.settings
    async with deps.db.acquire() as connection:
        lapsed = await runtimes.end_lapsed(connection, settings.machine_lease_s, BATCH)
    unreachable = await _left_alone(deps, ends.unreachable, settings.machine_grace_s, UNREACHABLE)
    silent = await _left_alone(deps, ends.silent, settings.machine_accept_limit_s, NOT_REPORTED)
    overdue = await _overdue(deps)
    if lapsed or unreachable or overdue or silent:
        log.info("machines_swept", runtimes=len(lapsed), unreachable=unreachable, overdue=overdue, silent=silent)
    return Swept(len(lapsed), unreachable, overdue, silent)


async def _overdue(deps: Deps) -> int:
    """End what no machine took in time, by a conditional update that races every grant for its row."""
    limit_s = deps.settings.machine_accept_limit_s

    async def work(connection: Connection) -> tuple[int, Told]:
        found = await ends.overdue(connection, limit_s, BATCH)
        told = Told()
        locked = await _lock(connection, found)
        if locked is None:
            return 0, told
        hot_rows, processes, actions = locked
        queued = [Ending(row.id, "failed", NOT_ACCEPTED) for row in processes if row.state == "queued"]
        waiting = [Ending(action, "failed", ACTION_NOT_ACCEPTED) for action, _, state in actions if state == "queued"]
        return len(queued) + len(waiting), await _end(deps, connection, hot_rows, queued, waiting, told)

    count, told = await deps.db.run(work)
    told.tell(deps)
    return count


async def _left_alone(deps: Deps, find: Find, limit_s: float, reason: str) -> int:
    """Let nobody wait for machines that are out of reach, or that are there and say nothing about what they took.

    What was not granted ends; what runs only loses its waiter, and what its machine says later is noted all the same.
    """

    async def work(connection: Connection) -> tuple[int, Told]:
        found = await find(connection, limit_s, BATCH)
        told = Told()
        locked = await _lock(connection, found)
        if locked is None:
            return 0, told
        hot_rows, processes, actions = locked
        # Looked at again now that the rows are locked: a machine that came back meanwhile keeps its work.
        ids = [*(row.id for row in processes), *(action for action, _, _ in actions)]
        still = {waiting.id for waiting in await find(connection, limit_s, len(ids), ids)}
        queued = [Ending(row.id, "failed", reason) for row in processes if row.id in still and row.state == "queued"]
        ending = [Ending(action, _lost(kind, state), reason) for action, kind, state in actions if action in still]
        left = [row for row in processes if row.id in still and row.state != "queued"]
        return len(still), await _end(deps, connection, hot_rows, queued, ending, told, left, reason)

    count, told = await deps.db.run(work)
    told.tell(deps)
    return count


def _lost(kind: str, state: str) -> Literal["failed", "unknown"]:
    """Return what becomes of an action on a machine that does not answer."""
    return "failed" if state == "queued" or kind == "read" else "unknown"


async def _lock(
    connection: Connection, found: Sequence[Waiting]
) -> tuple[dict[UUID, HotRow], list[EndedProcess], list[tuple[UUID, str, str]]] | None:
    """Lock agents, processes and actions, in this order, as far as nobody else has them."""
    if not found:
        return None
    hot_rows = await db.lock_agents(connection, {waiting.agent_id for waiting in found}, wait=False)
    if not hot_rows:
        return None
    wanted = {what: [waiting.id for waiting in found if waiting.what == what] for what in ("process", "action")}
    processes = await ends.try_lock_processes(connection, wanted["process"], hot_rows) if wanted["process"] else []
    actions = await ends.try_lock_actions(connection, wanted["action"], hot_rows) if wanted["action"] else []
    return hot_rows, processes, actions


async def _end(
    deps: Deps,
    connection: Connection,
    hot_rows: dict[UUID, HotRow],
    processes: Sequence[Ending],
    actions: Sequence[Ending],
    told: Told,
    left: Sequence[EndedProcess] = (),
    reason: str = UNREACHABLE,
) -> Told:
    """End what is to be ended, and give every call behind it, and behind what is left to run, its result."""
    ended = await ends.end_processes(connection, processes) if processes else []
    closed = await ends.end_actions(connection, actions) if actions else []
    if ended:
        closed += await ends.end_actions_of(connection, [process.id for process in ended])
    about = await _about(deps, connection, [*ended, *closed]) if reason == UNREACHABLE else {}
    results = results_of(ended, closed, about=about)
    for process in left:
        if process.tool_call_id is not None:
            value = failure(reason, process_id=process.id, state=process.state)
            results.setdefault(process.agent_id, []).append(Result(process.tool_call_id, "failed", value))
    told.machines.update(process.machine_id for process in ended)
    await settle(connection, hot_rows, results, told)
    return told


async def _about(
    deps: Deps, connection: Connection, lost: Sequence[EndedProcess | EndedAction]
) -> dict[UUID, dict[str, str]]:
    """Return what is missing at machines of pools that nobody reaches, by machine."""
    found = await ends.unmade(connection, {each.machine_id for each in lost}) if lost else []
    return {machine.id: about_unmade(machine, deps.places) for machine in found}
