"""Processes and their actions as machines move them: handed over, granted, reported, claimed.

What agents ask for is inserted by the tools (`machine_calls`); what ends without its machine is in `process_ends`.
Order of locks: machine, hot row, process, action, call. Source: machines.md §4–§6; coordination §9.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.agents import HotRow, NewEventRow
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.secrets import SealedRow
from omnara.db.sqlfiles import Queries

_SQL = Queries("processes")


class OfferedRow(msgspec.Struct, frozen=True):
    """One thing to hand over. `kind` process, end, or that of an action; `place` is an action's number.

    `env`, `secret_env` (name to UUID) and `payload` are JSON text.
    """

    kind: str
    process_id: UUID
    action_id: UUID | None
    place: int | None
    io_mode: str | None
    command: str | None
    shell: str | None
    cwd: str | None
    env: str | None
    secret_env: str | None
    wait_ms: int | None
    timeout_seconds: int | None
    project_id: UUID | None
    machine_id: UUID
    payload: str | None


class ReportedProcess(msgspec.Struct, frozen=True):
    """A locked process that a report is about. `quiet`: nothing was noted on its machine for half a minute.

    `replaced`: its machine has a new place, of which no command has told yet.
    """

    id: UUID
    agent_id: UUID
    machine_id: UUID
    tool_call_id: UUID | None
    purpose: str
    state: str
    reason_code: str
    exit_code: int | None
    exit_signal: str | None
    terminate_requested: str | None
    default_cursor: int
    next_action_seq: int
    granted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    closed_at: datetime | None
    project_id: UUID
    secret_env: str
    quiet: bool
    replaced: bool


class ReportedAction(msgspec.Struct, frozen=True):
    """A locked action that a report is about. `payload` and `result` are JSON text."""

    id: UUID
    agent_id: UUID
    process_id: UUID
    tool_call_id: UUID | None
    seq: int
    kind: str
    payload: str
    state: str
    reason_code: str
    result: str | None
    closed_at: datetime | None


class Finish(msgspec.Struct, frozen=True):
    """How a process ended, as its machine reports it."""

    state: str
    reason_code: str
    reason_message: str
    exit_code: int | None
    exit_signal: str | None
    started_at: datetime | None
    cursor: int | None
    ended_at: datetime | None


class HeldProcess(msgspec.Struct, frozen=True):
    """A process that a registration looks at, locked."""

    id: UUID
    agent_id: UUID
    tool_call_id: UUID | None
    purpose: str
    state: str
    granted: bool


class HeldAction(msgspec.Struct, frozen=True):
    """An action that a registration looks at, locked. `payload` is JSON text."""

    id: UUID
    agent_id: UUID
    process_id: UUID
    tool_call_id: UUID | None
    seq: int
    kind: str
    payload: str
    state: str
    reason_code: str


async def drain(
    connection: Connection, runtime_id: UUID, session_id: UUID, skip: Collection[UUID], processes: int, actions: int
) -> list[OfferedRow] | None:
    """Return what a channel has to hand over; None when it is not its runtime's live channel."""
    rows = await connection.fetch(_SQL["drain"], runtime_id, session_id, list(skip), processes, actions)
    if not rows:
        return None
    return [OfferedRow(*row) for row in rows if row["kind"] is not None]


async def accept_process(connection: Connection, runtime_id: UUID, session_id: UUID, process_id: UUID) -> UUID | None:
    """Grant a queued process to the machine of a channel; return that machine, None when it may not have it.

    One statement, which commits by itself in autocommit.
    """
    row = await connection.fetchrow(_SQL["accept_process"], runtime_id, session_id, process_id)
    return None if row is None else row["machine_id"]


async def accept_action(
    connection: Connection, runtime_id: UUID, session_id: UUID, process_id: UUID, action_id: UUID
) -> tuple[str, int] | None:
    """Grant a queued action whose turn it is; return the process's state and read cursor. As `accept_process`."""
    row = await connection.fetchrow(_SQL["accept_action"], runtime_id, session_id, process_id, action_id)
    return None if row is None else (row[0], row[1])


async def lock_for_report(
    connection: Connection, runtime_id: UUID, process_id: UUID
) -> tuple[HotRow, ReportedProcess] | None:
    """Lock agent and process of a report; None when the runtime may not report it, or there is none."""
    row = await connection.fetchrow(_SQL["lock_for_report"], runtime_id, process_id)
    if row is None:
        return None
    values = tuple(row)
    return HotRow(*values[:17]), ReportedProcess(*values[17:])


async def lock_waiting_report(
    connection: Connection, runtime_id: UUID, process_id: UUID
) -> tuple[HotRow, ReportedProcess, CallRow] | None:
    """Lock agent, process and the call that waits for it; None also when no call waits."""
    row = await connection.fetchrow(_SQL["lock_waiting_report"], runtime_id, process_id)
    if row is None:
        return None
    values = tuple(row)
    return HotRow(*values[:17]), ReportedProcess(*values[17:37]), CallRow(*values[37:])


_NO_END = (None,) * 9


async def publish(
    connection: Connection,
    hot: HotRow,
    call_id: UUID,
    outcome: str,
    event: NewEventRow,
    *,
    wake: bool,
    ended: tuple[UUID, Finish] | None = None,
) -> None:
    """Write the one result that was added to a locked agent, its call and its hot row, in one statement.

    `ended`: a locked process whose end is written with it, as `finished` does. Raises RuntimeError when the call did
    not wait or the process is gone: the locks rule that out, so the transaction must end.
    """
    whole = await connection.fetchval(
        _SQL["publish_result"],
        hot.agent_id,
        event.sequence,
        event.id,
        event.turn_id,
        event.turn_sequence,
        event.payload,
        call_id,
        outcome,
        hot.batch_sequence,
        hot.open_calls,
        wake,
        *(_NO_END if ended is None else (ended[0], *msgspec.structs.astuple(ended[1]))),
    )
    if not whole:
        raise RuntimeError("a call was completed twice, or its process went, under the lock of its agent")


async def may_report(connection: Connection, runtime_id: UUID) -> bool:
    """Whether a runtime's reports count at all."""
    return bool(await connection.fetchval(_SQL["may_report"], runtime_id))


async def lock_action(connection: Connection, process_id: UUID, action_id: UUID) -> ReportedAction | None:
    """Lock an action of a locked process."""
    row = await connection.fetchrow(_SQL["lock_action"], action_id, process_id)
    return None if row is None else ReportedAction(*row)


async def call_of(connection: Connection, agent_id: UUID, call_id: UUID) -> CallRow | None:
    """Return a call of a locked agent."""
    row = await connection.fetchrow(_SQL["call_of"], agent_id, call_id)
    return None if row is None else CallRow(*row)


async def waiting_calls(connection: Connection, agent_id: UUID, call_ids: Collection[UUID]) -> list[CallRow]:
    """Return those calls of a locked agent that still wait, in order."""
    return [CallRow(*row) for row in await connection.fetch(_SQL["waiting_calls"], agent_id, list(call_ids))]


async def started(connection: Connection, process_id: UUID, started_at: datetime, cursor: int | None) -> None:
    """Note that a locked process runs; `cursor` moves the default of reads."""
    await connection.execute(_SQL["process_started"], process_id, started_at, cursor)


async def finished(connection: Connection, process_id: UUID, end: Finish) -> None:
    """Note how a locked process ended."""
    await connection.execute(_SQL["process_finished"], process_id, *msgspec.structs.astuple(end))


async def action_reported(
    connection: Connection, action_id: UUID, state: str, reason_code: str, result: str | None
) -> None:
    """Note what came of a locked action; `result` is JSON text."""
    await connection.execute(_SQL["action_reported"], action_id, state, reason_code, result)


async def set_cursor(connection: Connection, process_id: UUID, cursor: int) -> None:
    """Move the default of reads of a locked process."""
    await connection.execute(_SQL["set_cursor"], process_id, cursor)


async def lock_agents(connection: Connection, agent_ids: Collection[UUID], *, wait: bool = True) -> dict[UUID, HotRow]:
    """Lock agents in order of id; without `wait`, only those that nobody else has locked."""
    statement = _SQL["lock_agents" if wait else "try_lock_agents"]
    return {row["agent_id"]: HotRow(*row) for row in await connection.fetch(statement, list(agent_ids))}


async def agents_on(connection: Connection, machine_id: UUID, claimed: Collection[UUID] = ()) -> list[UUID]:
    """Return agents with anything open on a locked machine, and those behind claimed processes."""
    return [row[0] for row in await connection.fetch(_SQL["agents_on"], machine_id, list(claimed))]


async def lock_held(
    connection: Connection, machine_id: UUID, claimed: Collection[UUID], agent_ids: Collection[UUID]
) -> list[HeldProcess]:
    """Lock what a registration decides about: open or claimed processes of locked agents."""
    rows = await connection.fetch(_SQL["lock_processes"], machine_id, list(claimed), list(agent_ids))
    return [HeldProcess(*row) for row in rows]


async def requeue_reads(connection: Connection, machine_id: UUID, agent_ids: Collection[UUID]) -> None:
    """Put every accepted read of locked agents on a machine back into its queue."""
    await connection.execute(_SQL["requeue_reads"], machine_id, list(agent_ids))


async def lock_actions(connection: Connection, resolved: Mapping[UUID, int]) -> list[HeldAction]:
    """Lock actions of locked processes that are open or above the given numbers, in order."""
    rows = await connection.fetch(_SQL["lock_actions"], list(resolved), list(resolved.values()))
    return [HeldAction(*row) for row in rows]


async def secrets_for(
    connection: Connection, secret_ids: Collection[UUID], project_id: UUID, machine_id: UUID
) -> list[SealedRow]:
    """Return the current values, sealed, of those secrets that a project's command on a machine may have."""
    rows = await connection.fetch(_SQL["project_secrets"], list(secret_ids), project_id, machine_id)
    return [SealedRow(*row) for row in rows]


async def past_values(connection: Connection, secret_ids: Collection[UUID], newest: int) -> list[SealedRow]:
    """Return the newest values, sealed, that secrets ever had."""
    return [SealedRow(*row) for row in await connection.fetch(_SQL["past_secrets"], list(secret_ids), newest)]
