"""Reading an agent's log as the engine reads it."""

from __future__ import annotations

from uuid import UUID

import asyncpg

from omnara.db.snapshot import decode_event
from omnara.domain.events import Event


async def events_of(sql: asyncpg.Connection, agent_id: UUID) -> list[Event]:
    """The whole log, validated, oldest first."""
    rows = await sql.fetch(
        """select sequence, id, kind, turn_id, turn_sequence, is_opening, payload, meta, replay, created_at
           from events where agent_id = $1 order by sequence""",
        agent_id,
    )
    return [decode_event(row) for row in rows]
