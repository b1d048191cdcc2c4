"""Taking work away from machines: cancel, archive, release of a binding, deletion of a machine, a revoked token.

What waits ends at once and never runs. What was granted belongs to its machine: it is asked to end it, again and again
until it reports, unless the machine itself is taken away; then nobody will report, and the outcome is unknown.
Source: machines.md §4 (agent cancel), §8 (delete, revoke); engine.md §8.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from uuid import UUID

from omnara.db import machine_calls, runtimes
from omnara.db import process_ends as ends
from omnara.db import processes as db
from omnara.db.connection import Connection
from omnara.db.process_ends import EndedAction, EndedProcess, Ending
from omnara.engine.appending import Appending
from omnara.engine.machines.completing import Told, add_results, results_of, settle

BEFORE_GRANT: Final = "agent_canceled_before_grant"
AFTER_GRANT: Final = "agent_canceled_after_grant"
ARCHIVED: Final = "agent_archived"
RELEASED: Final = "machine_binding_released"
DECOMMISSIONED: Final = "machine_decommissioned"
REVOKED: Final = "authorization_revoked"
INTERRUPTED: Final = "call_interrupted"


async def cancel_calls(connection: Connection, agent_id: UUID, calls: Collection[UUID]) -> set[UUID]:
    """Take back what canceled calls asked of machines; return the machines to hint at after the commit.

    Inside the transaction that locked the agent and gives these calls their results. A process whose call has its
    result already is not touched: it runs in the background.
    """
    if not calls:
        return set()
    files = await end_transfers(connection, [(agent_id, call_id) for call_id in calls], BEFORE_GRANT, AFTER_GRANT)
    processes = await ends.cancel_processes(connection, agent_id, BEFORE_GRANT, AFTER_GRANT, calls=calls)
    actions = await ends.cancel_actions(connection, agent_id, BEFORE_GRANT, AFTER_GRANT, calls=calls)
    more = await _actions_of(connection, processes)
    return files | _machines(processes, [*actions, *more])


async def end_transfers(
    connection: Connection, calls: Collection[tuple[UUID, UUID]], before: str, after: str
) -> set[UUID]:
    """End what carries files for calls (agent, call) that are over; return the machines to hint at after the commit.

    Inside the transaction that locked the agents and gives these calls their results: whoever carried the file may be
    gone, and nobody else would look after it. What its machine reports later changes nothing.
    """
    found = await machine_calls.lock_transfers(connection, calls)
    if not found:
        return set()
    await machine_calls.end_internal(connection, found, before, after)
    await machine_calls.drop_pieces(connection, found, after)
    return set(found.values())


async def close_agent(connection: Connection, agent_id: UUID, reason: str = ARCHIVED) -> set[UUID]:
    """End everything of a locked agent whose calls have their results; return the machines to hint at.

    Inside the transaction that archives it.
    """
    processes = await ends.cancel_processes(connection, agent_id, reason, reason)
    actions = await ends.cancel_actions(connection, agent_id, reason, reason)
    return _machines(processes, actions)


async def close_binding(
    connection: Connection, appending: Appending, binding_id: UUID, reason: str = RELEASED
) -> set[UUID]:
    """End what a locked agent has on a machine that is taken from it; return the machines to hint at.

    Waiting calls get their results in `appending`, which the caller writes: those of granted processes as well, since
    nobody may read their output any more.
    """
    agent_id = appending.hot.agent_id
    processes = await ends.cancel_processes(connection, agent_id, reason, reason, binding_id=binding_id)
    actions = await ends.cancel_actions(connection, agent_id, reason, reason, binding_id=binding_id)
    told = results_of([_as_ended(process, reason) for process in processes], actions)
    await add_results(connection, appending, told.get(agent_id, []))
    return _machines(processes, actions)


async def close_machine(
    connection: Connection, machine_id: UUID, reason: str = DECOMMISSIONED, *, message: str = ""
) -> Told:
    """End a locked machine's runtime and everything on it. Locks the agents concerned, in order.

    Queued processes fail, granted ones are unknown; every waiting call has its result, in which `message`, if there is
    one, says why. The caller tells after its commit.
    """
    await runtimes.end_active(connection, machine_id, reason)
    return await close_machine_work(connection, machine_id, reason, message=message)


async def close_token(connection: Connection, machine_id: UUID, token_id: UUID) -> Told:
    """End a locked machine's runtime if it uses a token that was revoked, and what was granted to it.

    What is queued waits for a daemon with another token. The caller tells after its commit.
    """
    current = await runtimes.active_token(connection, machine_id)
    if current != token_id:
        return Told()
    await runtimes.end_active(connection, machine_id, REVOKED)
    return await close_machine_work(connection, machine_id, REVOKED, queued=False)


async def close_machine_work(
    connection: Connection, machine_id: UUID, reason: str, *, queued: bool = True, message: str = ""
) -> Told:
    """End everything on a locked machine whose runtime has ended; with `queued` also what it was never given."""
    agents = await db.agents_on(connection, machine_id)
    hot_rows = await db.lock_agents(connection, agents)
    processes, actions = await ends.open_on(connection, machine_id, hot_rows)
    ended = await ends.end_processes(
        connection,
        [
            Ending(found, "failed" if state == "queued" else "unknown", reason)
            for found, state in processes
            if queued or state != "queued"
        ],
    )
    closed = await ends.end_actions(
        connection,
        [
            Ending(found, "failed" if state == "queued" or kind == "read" else "unknown", reason)
            for found, kind, state in actions
        ],
    )
    told = Told(machines={machine_id})
    await settle(connection, hot_rows, results_of(ended, closed, message=message), told)
    return told


async def _actions_of(connection: Connection, processes: Collection[EndedProcess]) -> list[EndedAction]:
    over = [process.id for process in processes if process.state == "failed"]
    return await ends.end_actions_of(connection, over) if over else []


def _as_ended(process: EndedProcess, reason: str) -> EndedProcess:
    """Return a process that is only asked to end as one that ended, for the call that must not wait for it."""
    if process.state == "failed":
        return process
    return EndedProcess(
        process.id, process.agent_id, process.machine_id, process.tool_call_id, process.purpose, "unknown", reason
    )


def _machines(processes: Collection[EndedProcess], actions: Collection[EndedAction]) -> set[UUID]:
    return {*(process.machine_id for process in processes), *(action.machine_id for action in actions)}
