"""What open event streams ask the database: the next page of a log, which logs grew, which keys still hold.

The stored payload is passed on as text: an event is shown exactly as it was saved, without being decoded on the way.
Source: coordination §6 (one query for all streams), api.md §11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.reads import EventRow
from omnara.db.sqlfiles import Queries

_SQL: Final = Queries("streams")


class LogPage(msgspec.Struct, frozen=True):
    """Events in order, with the head of the log (0: empty) and the agent's state from the same snapshot."""

    head: int
    archived: bool
    events: tuple[EventRow, ...]


PAGE_BYTES: Final = 1024 * 1024
"""Stored bytes after which a page ends early: a stream that is not read must not hold a hundred huge events."""


async def page(conn: Connection, agent_id: UUID, after: int, limit: int) -> LogPage | None:
    """Return events after sequence `after`, at most `limit`, or None when there is no such agent."""
    rows = await conn.fetch(_SQL["page"], agent_id, after, limit, PAGE_BYTES)
    if not rows:
        return None
    events = tuple(EventRow(*tuple(row)[2:]) for row in rows if row["sequence"] is not None)
    return LogPage(rows[0]["head"], rows[0]["archived"], events)


async def news(conn: Connection, agent_ids: Sequence[UUID], seen: Sequence[int]) -> list[UUID]:
    """Return those agents whose log goes beyond `seen` (parallel to `agent_ids`), or that were archived."""
    return [row["agent_id"] for row in await conn.fetch(_SQL["news"], agent_ids, seen)]


async def usable_keys(conn: Connection, key_ids: Sequence[UUID]) -> set[UUID]:
    """Return those of the credentials that have not been revoked."""
    return {row["id"] for row in await conn.fetch(_SQL["usable_keys"], key_ids)}
