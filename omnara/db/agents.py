"""Agents, the lock on their hot row, and appending to their log: the ground of every write by the API.

Source: DESIGN §3 (order of locks), coordination §2 and §9.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("agents")

Gate = Literal["open", "paused", "crashed", "archived"]
Wake = Literal["wake", "sleep", "keep"]


class AgentRow(msgspec.Struct, frozen=True):
    """An agent as the scoped API shows it. `archived_at` None means active."""

    id: UUID
    org_id: UUID
    project_id: UUID
    name: str
    current_config_id: UUID
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None
    provider_config: str
    model: str


class AgentRef(msgspec.Struct, frozen=True):
    """Where an agent belongs: all that a permission check needs."""

    id: UUID
    org_id: UUID
    project_id: UUID
    current_config_id: UUID


class HotRow(msgspec.Struct):
    """A locked hot row. Mutable: a use case changes it and writes it back once, in the same transaction."""

    agent_id: UUID
    project_id: UUID
    gate: Gate
    worker_id: UUID | None
    next_sequence: int
    next_rank: int
    turn_id: UUID | None
    turn_sequence: int
    turn_open: bool
    batch_sequence: int | None
    open_calls: int
    attempt: int
    retry_at: datetime | None
    step_number: int
    deaths: int
    history_version: int
    config_id: UUID


class NewEventRow(msgspec.Struct, frozen=True):
    """An event to insert. `payload` is JSON text."""

    sequence: int
    id: UUID
    kind: str
    turn_id: UUID
    turn_sequence: int
    is_opening: bool
    is_semantic: bool
    payload: str


class NewTurnRow(msgspec.Struct, frozen=True):
    """A turn that begins with the event at `first_sequence`."""

    turn_sequence: int
    id: UUID
    first_sequence: int


async def find_agent(connection: Connection, agent_id: UUID) -> AgentRow | None:
    """Return an agent by id, archived or not."""
    row = await connection.fetchrow(_SQL["find_agent"], agent_id)
    return None if row is None else AgentRow(*row)


async def locate_agent(connection: Connection, agent_id: UUID) -> AgentRef | None:
    """Return where an agent belongs, archived or not."""
    row = await connection.fetchrow(_SQL["locate_agent"], agent_id)
    return None if row is None else AgentRef(*row)


async def locate_open_agent(connection: Connection, agent_id: UUID) -> AgentRef | None:
    """Return where an agent belongs, archived or not; None also when its project is deleted."""
    row = await connection.fetchrow(_SQL["locate_open_agent"], agent_id)
    return None if row is None else AgentRef(*row)


async def find_agent_by_key(connection: Connection, project_id: UUID, key: str) -> AgentRow | None:
    """Return the agent that was launched with an Idempotency-Key."""
    row = await connection.fetchrow(_SQL["find_agent_by_key"], project_id, key)
    return None if row is None else AgentRow(*row)


async def insert_agent(
    connection: Connection,
    agent_id: UUID,
    org_id: UUID,
    project_id: UUID,
    *,
    name: str,
    config_id: UUID,
    key: str | None,
) -> bool:
    """Insert an agent and its hot row; False, with nothing written, when `key` is used or the project deleted."""
    row = await connection.fetchrow(_SQL["insert_agent"], agent_id, org_id, project_id, name, config_id, key)
    if row is None:
        return False
    await connection.execute(_SQL["insert_hot_row"], agent_id, project_id, config_id)
    return True


async def lock_hot_row(connection: Connection, agent_id: UUID) -> HotRow | None:
    """Lock an agent's hot row until the transaction ends (waits up to `lock_timeout`); None for an unknown agent."""
    row = await connection.fetchrow(_SQL["lock_hot_row"], agent_id)
    return None if row is None else HotRow(*row)


async def write_hot_row(connection: Connection, hot: HotRow, wake: Wake, *, release: bool) -> None:
    """Write a locked hot row back and move its generation. `release` takes a claim away (new epoch)."""
    await connection.execute(
        _SQL["write_hot_row"],
        hot.agent_id,
        hot.gate,
        hot.next_sequence,
        hot.next_rank,
        hot.turn_id,
        hot.turn_sequence,
        hot.turn_open,
        hot.batch_sequence,
        hot.open_calls,
        hot.attempt,
        hot.retry_at,
        hot.deaths,
        hot.history_version,
        wake,
        release,
        hot.config_id,
    )


async def write_claimed_row(connection: Connection, hot: HotRow, worker_id: UUID, claim_token: int, epoch: int) -> bool:
    """Write the log's end and the open calls of a locked hot row back; False when the claim is not that holder's."""
    row = await connection.fetchval(
        _SQL["write_claimed_row"],
        hot.agent_id,
        hot.next_sequence,
        hot.batch_sequence,
        hot.open_calls,
        worker_id,
        claim_token,
        epoch,
    )
    return row is not None


async def touch_agent(connection: Connection, agent_id: UUID, config_id: UUID) -> None:
    """Point a locked agent at a config and note the time."""
    await connection.execute(_SQL["touch_agent"], agent_id, config_id)


async def archive_agent(connection: Connection, agent_id: UUID) -> None:
    """Mark a locked agent archived; its first time of archiving stays."""
    await connection.execute(_SQL["archive_agent"], agent_id)


async def append_events(connection: Connection, agent_id: UUID, events: Sequence[NewEventRow]) -> datetime:
    """Insert events of a locked agent and return their common time. There must be at least one."""
    columns = zip(*(msgspec.structs.astuple(event) for event in events), strict=True)
    rows = await connection.fetch(_SQL["append_events"], agent_id, *(list(column) for column in columns))
    created_at: datetime = rows[0]["created_at"]
    return created_at


async def open_turns(connection: Connection, agent_id: UUID, turns: Sequence[NewTurnRow]) -> None:
    """Insert turns of a locked agent."""
    columns = zip(*(msgspec.structs.astuple(turn) for turn in turns), strict=True)
    await connection.execute(_SQL["open_turns"], agent_id, *(list(column) for column in columns))


async def cancel_started_step(connection: Connection, agent_id: UUID, number: int) -> None:
    """Close the running step of a locked agent as canceled, if one runs."""
    await connection.execute(_SQL["cancel_started_steps"], agent_id, number)


async def void_ranges(connection: Connection, agent_id: UUID) -> list[tuple[int, int]]:
    """Return the half-open ranges of sequences that the fold skips, in order."""
    return [(row[0], row[1]) for row in await connection.fetch(_SQL["void_ranges"], agent_id)]


async def add_void(connection: Connection, agent_id: UUID, ranges: Sequence[tuple[int, int]]) -> None:
    """Make the fold skip further half-open ranges of a locked agent. There must be at least one."""
    await connection.execute(_SQL["add_void"], agent_id, [r[0] for r in ranges], [r[1] for r in ranges])
