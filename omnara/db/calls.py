"""Tool calls as the API completes and lists them. The claim holder's own changes go through `advance`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("calls")

_PAGE_BYTES: Final = 1024 * 1024
"""Stored bytes of inputs after which a page of calls ends early: one input may have megabytes."""


class CallRow(msgspec.Struct, frozen=True):
    """A tool call. `input` is JSON text."""

    id: UUID
    agent_id: UUID
    output_sequence: int
    ordinal: int
    turn_id: UUID
    turn_sequence: int
    provider_call_id: str
    name: str
    type: str
    input: str
    state: str
    outcome: str | None
    created_at: datetime
    completed_at: datetime | None


class Completion(msgspec.Struct, frozen=True):
    """The end of a call, with the sequence of its result event."""

    call_id: UUID
    outcome: str
    result_sequence: int


async def find_call(connection: Connection, agent_id: UUID, call_id: UUID) -> CallRow | None:
    """Return one call of an agent."""
    row = await connection.fetchrow(_SQL["find_call"], agent_id, call_id)
    return None if row is None else CallRow(*row)


async def open_calls(connection: Connection, agent_id: UUID, output_sequence: int) -> list[CallRow]:
    """Return the calls of one output that have no result, in call order. The agent is locked."""
    return [CallRow(*row) for row in await connection.fetch(_SQL["open_calls"], agent_id, output_sequence)]


async def all_open_calls(connection: Connection, agent_id: UUID) -> list[CallRow]:
    """Return every call of a locked agent that has no result, in the order of the log."""
    return [CallRow(*row) for row in await connection.fetch(_SQL["all_open_calls"], agent_id)]


async def complete(connection: Connection, agent_id: UUID, completions: Sequence[Completion]) -> list[CallRow]:
    """Complete open calls of a locked agent; return the rows that changed, which must be all of them."""
    rows = await connection.fetch(
        _SQL["complete_calls"],
        agent_id,
        [c.call_id for c in completions],
        [c.outcome for c in completions],
        [c.result_sequence for c in completions],
    )
    return [CallRow(*row) for row in rows]


async def move(connection: Connection, agent_id: UUID, call_id: UUID, from_state: str, to_state: str) -> bool:
    """Move a call of a locked agent; False when it was not in `from_state`."""
    return await connection.fetchval(_SQL["move_call"], agent_id, call_id, from_state, to_state) is not None


async def batches_of(connection: Connection, agent_id: UUID, sequences: Sequence[int]) -> list[tuple[int, int | None]]:
    """Return (output, result) sequences of all calls of the outputs that any of `sequences` belongs to."""
    rows = await connection.fetch(_SQL["batches_of_results"], agent_id, list(sequences))
    return [(row[0], row[1]) for row in rows]


async def list_calls(
    connection: Connection,
    agent_id: UUID,
    *,
    state: str | None,
    call_type: str | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
) -> tuple[list[CallRow], bool]:
    """Return up to `limit` calls, oldest first, after a (created_at, id) key, and whether there are more.

    Fewer when their inputs are large.
    """
    time, last_id = after or (None, None)
    found = await connection.fetch(
        _SQL["list_calls"], agent_id, state, call_type, time, last_id, limit + 1, _PAGE_BYTES
    )
    rows = [CallRow(*tuple(row)[:-1]) for row in found[:limit]]
    return rows, bool(found) and found[0]["found"] > len(rows)
