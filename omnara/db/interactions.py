"""Forms that wait for a person: permission to run a call, and questions of the agent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("interactions")


class InteractionRow(msgspec.Struct, frozen=True):
    """A form. `request` and `resolution` are JSON texts; `resolved_by` names the principal that answered."""

    id: UUID
    agent_id: UUID
    tool_call_id: UUID
    kind: str
    state: str
    request: str
    resolution: str | None
    resolved_by_input_id: UUID | None
    resolved_by: str | None
    reason: str | None
    created_at: datetime
    resolved_at: datetime | None


async def find(connection: Connection, agent_id: UUID, interaction_id: UUID) -> InteractionRow | None:
    """Return one form of an agent."""
    row = await connection.fetchrow(_SQL["find_interaction"], agent_id, interaction_id)
    return None if row is None else InteractionRow(*row)


async def resolve(
    connection: Connection, agent_id: UUID, interaction_id: UUID, *, resolution: str, input_id: UUID, principal: str
) -> InteractionRow | None:
    """Record the answer of a locked agent's open form; None when it is not open."""
    row = await connection.fetchrow(
        _SQL["resolve_interaction"], agent_id, interaction_id, resolution, input_id, principal
    )
    return None if row is None else InteractionRow(*row)


async def open_forms(connection: Connection, agent_id: UUID) -> list[InteractionRow]:
    """Return the open forms of a locked agent, oldest first."""
    return [InteractionRow(*row) for row in await connection.fetch(_SQL["open_interactions"], agent_id)]


async def cancel(
    connection: Connection, agent_id: UUID, *, calls: Sequence[UUID] | None, input_id: UUID | None, reason: str
) -> int:
    """Cancel the open forms of a locked agent, of these calls or (None) all; return how many."""
    wanted = None if calls is None else list(calls)
    return len(await connection.fetch(_SQL["cancel_interactions"], agent_id, wanted, input_id, reason))


async def insert(
    connection: Connection, agent_id: UUID, interaction_id: UUID, call_id: UUID, kind: str, request: str
) -> None:
    """Open a form for a call of a locked agent."""
    await connection.execute(_SQL["insert_interaction"], agent_id, interaction_id, call_id, kind, request)


async def was_asked(connection: Connection, agent_id: UUID, call_id: UUID) -> bool:
    """Whether a person was asked to allow a call."""
    asked: bool = await connection.fetchval(_SQL["was_asked"], agent_id, call_id)
    return asked


async def list_forms(
    connection: Connection, agent_id: UUID, *, state: str | None, after: tuple[datetime, UUID] | None, limit: int
) -> list[InteractionRow]:
    """Return forms, oldest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    rows = await connection.fetch(_SQL["list_interactions"], agent_id, state, time, last_id, limit)
    return [InteractionRow(*row) for row in rows]
