"""How work on machines ends without its machine: reconciled, taken back, out of reach, out of time.

Every statement says in itself which states it may leave, so whoever comes second changes nothing.
Source: machines.md §4 (timers), §5, §8.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("processes")


class EndedProcess(msgspec.Struct, frozen=True):
    """A process that a statement ended or asked to end (then `state` is a live one)."""

    id: UUID
    agent_id: UUID
    machine_id: UUID
    tool_call_id: UUID | None
    purpose: str
    state: str
    reason_code: str


class EndedAction(msgspec.Struct, frozen=True):
    """An action that a statement ended."""

    id: UUID
    agent_id: UUID
    machine_id: UUID
    process_id: UUID
    tool_call_id: UUID | None
    kind: str
    state: str
    reason_code: str
    process_state: str


class Ending(msgspec.Struct, frozen=True):
    """How a process or an action is to be ended by the server."""

    id: UUID
    state: str
    reason_code: str


class Waiting(msgspec.Struct, frozen=True):
    """Something whose time ran out: `what` is process or action."""

    what: str
    agent_id: UUID
    id: UUID


class Unmade(msgspec.Struct, frozen=True):
    """A pool machine that nobody reaches, and what is known of it."""

    id: UUID
    provider: str
    lifecycle_state: str
    reason_code: str
    reason_message: str


async def end_processes(connection: Connection, endings: Sequence[Ending]) -> list[EndedProcess]:
    """End processes that are not over; return those that changed."""
    rows = await connection.fetch(_SQL["end_processes"], *_columns(endings))
    return [EndedProcess(*row) for row in rows]


async def end_actions(connection: Connection, endings: Sequence[Ending]) -> list[EndedAction]:
    """End open actions; return those that changed."""
    return [EndedAction(*row) for row in await connection.fetch(_SQL["end_actions"], *_columns(endings))]


async def end_actions_of(connection: Connection, process_ids: Collection[UUID]) -> list[EndedAction]:
    """End the queued actions of processes that are over now, but for reads of output that may be there."""
    return [EndedAction(*row) for row in await connection.fetch(_SQL["end_actions_of"], list(process_ids))]


async def cancel_processes(
    connection: Connection,
    agent_id: UUID,
    before: str,
    after: str,
    *,
    calls: Collection[UUID] | None = None,
    binding_id: UUID | None = None,
) -> list[EndedProcess]:
    """End queued processes of a locked agent (`before`) and ask for the end of granted ones (`after`)."""
    wanted = None if calls is None else list(calls)
    rows = await connection.fetch(_SQL["cancel_processes"], agent_id, wanted, binding_id, before, after)
    return [EndedProcess(*row) for row in rows]


async def cancel_actions(
    connection: Connection,
    agent_id: UUID,
    before: str,
    after: str,
    *,
    calls: Collection[UUID] | None = None,
    binding_id: UUID | None = None,
) -> list[EndedAction]:
    """End open actions of a locked agent: queued ones failed (`before`), accepted ones unknown (`after`)."""
    wanted = None if calls is None else list(calls)
    rows = await connection.fetch(_SQL["cancel_actions"], agent_id, wanted, binding_id, before, after)
    return [EndedAction(*row) for row in rows]


async def open_on(
    connection: Connection, machine_id: UUID, agent_ids: Collection[UUID]
) -> tuple[list[tuple[UUID, str]], list[tuple[UUID, str, str]]]:
    """Lock all that is open on a locked machine: processes (id, state) and actions (id, kind, state)."""
    found = await connection.fetch(_SQL["open_on_machine"], machine_id, list(agent_ids))
    actions = await connection.fetch(_SQL["open_actions_on_machine"], machine_id, list(agent_ids))
    return [(row[0], row[1]) for row in found], [(row[0], row[1], row[2]) for row in actions]


async def overdue(connection: Connection, limit_s: float, limit: int) -> list[Waiting]:
    """Return what no machine took within `limit_s` seconds."""
    return [Waiting(*row) for row in await connection.fetch(_SQL["overdue"], limit_s, limit)]


async def unreachable(
    connection: Connection, grace_s: float, limit: int, among: Collection[UUID] | None = None
) -> list[Waiting]:
    """Return what has waited for machines out of reach for `grace_s` seconds; `among`: only of these ids."""
    wanted = None if among is None else list(among)
    return [Waiting(*row) for row in await connection.fetch(_SQL["unreachable"], grace_s, limit, wanted)]


async def unmade(connection: Connection, machine_ids: Collection[UUID]) -> list[Unmade]:
    """Return those of these machines, out of reach, that are of pools and have no place that somebody drives."""
    return [Unmade(*row) for row in await connection.fetch(_SQL["unmade"], list(machine_ids))]


async def silent(
    connection: Connection, limit_s: float, limit: int, among: Collection[UUID] | None = None
) -> list[Waiting]:
    """Return what machines took `limit_s` seconds ago and never spoke of again; `among`: only of these ids."""
    wanted = None if among is None else list(among)
    return [Waiting(*row) for row in await connection.fetch(_SQL["silent"], limit_s, limit, wanted)]


async def try_lock_processes(
    connection: Connection, ids: Collection[UUID], agent_ids: Collection[UUID]
) -> list[EndedProcess]:
    """Lock processes of locked agents that are not over, without waiting for anybody."""
    rows = await connection.fetch(_SQL["try_lock_processes"], list(ids), list(agent_ids))
    return [EndedProcess(*row) for row in rows]


async def try_lock_actions(
    connection: Connection, ids: Collection[UUID], agent_ids: Collection[UUID]
) -> list[tuple[UUID, str, str]]:
    """Lock open actions of locked agents without waiting; return (id, kind, state)."""
    rows = await connection.fetch(_SQL["try_lock_actions"], list(ids), list(agent_ids))
    return [(row[0], row[1], row[2]) for row in rows]


def _columns(endings: Sequence[Ending]) -> tuple[list[Any], list[Any], list[Any]]:
    return [e.id for e in endings], [e.state for e in endings], [e.reason_code for e in endings]
