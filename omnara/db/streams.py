"""What open event streams ask the database: the next page of a log, which logs grew, which rights still hold.

The stored payload is passed on as text: an event is shown exactly as it was saved, without being decoded on the way.
Source: coordination §6 (one query for all streams), api.md §11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.agents import Gate
from omnara.db.connection import Connection
from omnara.db.failures import is_unavailability
from omnara.db.reads import EventRow
from omnara.db.sqlfiles import Queries

_SQL: Final = Queries("streams")


class Reading(msgspec.Struct, frozen=True):
    """The right by which a stream is open: a credential whose holder has a role in a project."""

    key_id: UUID
    project_id: UUID


class LogPage(msgspec.Struct, frozen=True):
    """Events in order, with the head of the log (0: empty) and the agent's gate from the same snapshot.

    `last_id` is the id of the event that the page comes after, None when there is none.
    """

    head: int
    gate: Gate
    last_id: UUID | None
    events: tuple[EventRow, ...]


PAGE_BYTES: Final = 1024 * 1024
"""Stored bytes after which a page ends early: a stream that is not read must not hold a hundred huge events."""


async def page(conn: Connection, agent_id: UUID, after: int, limit: int) -> LogPage | None:
    """Return events after sequence `after`, at most `limit`, or None when there is no such agent."""
    rows = await conn.fetch(_SQL["page"], agent_id, after, limit, PAGE_BYTES)
    if not rows:
        return None
    events = tuple(EventRow(*tuple(row)[3:]) for row in rows if row["sequence"] is not None)
    return LogPage(rows[0]["head"], rows[0]["gate"], rows[0]["last_id"], events)


async def news(conn: Connection, agent_ids: Sequence[UUID], seen: Sequence[int]) -> list[UUID]:
    """Return those agents whose log does not end at `seen` (parallel to `agent_ids`), that are archived or crashed."""
    return [row["agent_id"] for row in await conn.fetch(_SQL["news"], agent_ids, seen)]


async def timeline(conn: Connection) -> str:
    """Return the timeline of the database. What was committed in one may be missing in the next. Empty where the
    service does not tell.
    """
    try:
        found: str = await conn.fetchval(_SQL["timeline"])
    except asyncpg.PostgresError as error:
        if is_unavailability(error):
            raise
        return ""
    return found


async def strangers(
    conn: Connection, agent_ids: Sequence[UUID], sequences: Sequence[int], ids: Sequence[UUID]
) -> list[UUID]:
    """Return those agents whose log has another event, or none, at a sequence than this id (parallel sequences)."""
    return [row["agent_id"] for row in await conn.fetch(_SQL["strangers"], agent_ids, sequences, ids)]


async def still_readable(conn: Connection, readings: Sequence[Reading]) -> set[Reading]:
    """Return those of these rights to read that still hold."""
    keys, projects = [item.key_id for item in readings], [item.project_id for item in readings]
    return {Reading(*row) for row in await conn.fetch(_SQL["still_readable"], keys, projects)}
