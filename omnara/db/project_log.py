"""The logs of all agents of a project as one, in the order of commits.

Sequences are per agent and clocks say nothing about the order in which transactions commit, so a place in this order is
a snapshot: the set of transactions that were visible at one moment. An event belongs to what a reader has exactly if
the transaction that wrote it is in the set. Per agent that is a prefix of its log, since writers of one agent follow
each other under its lock; so a snapshot and a log give one sequence, found by walking back from the end of the log.

Three facts carry it. A transaction writes events in no subtransaction (a snapshot does not list those): the pool opens
one transaction and no savepoint. Each transaction that appends also updates the agent's hot row. And ids of
transactions are kept with 32 bits in a row, so they mean something only for rows that are not very old: what was
written an hour before a snapshot counts as seen by it without a look at its transaction, none of which is nearly as
long. After a failover ids may have been given out again; then what is older than a place by less than a minute is sent
again rather than lost. Source: DESIGN §2 (invariants 1, 9, 10); coordination §2 (snapshots and lock waits).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.reads import EventRow
from omnara.db.sqlfiles import Queries
from omnara.db.streams import PAGE_BYTES
from omnara.errors import Unavailable

_SQL: Final = Queries("project_log")


class Mark(msgspec.Struct, frozen=True):
    """A moment in the order of commits, in one history of the database: a failover begins another timeline."""

    snapshot: str
    taken_at: datetime
    timeline: str


class Here(msgspec.Struct, frozen=True):
    """The present moment, and which database it is: a copy restored elsewhere is another one."""

    mark: Mark
    database: str


class Growth(msgspec.Struct, frozen=True):
    """Events of one agent: after sequence `low`, up to `high`."""

    agent_id: UUID
    low: int
    high: int


class Found(msgspec.Struct, frozen=True):
    """Logs that grew, in order of agent id, and the moment of the look. `more`: there may be further agents."""

    mark: Mark
    growth: list[Growth]
    more: bool
    last_agent: UUID


async def here(conn: Connection) -> Here:
    """Return the present moment and the database."""
    row = await conn.fetchrow(_SQL["here"])
    assert row is not None
    return Here(Mark(row[0], row[1], row[2]), row[3])


async def growth(
    conn: Connection, project_id: UUID, since: Mark | None, until: Mark | None, after: UUID, limit: int
) -> Found:
    """Return which logs of a project grew between two moments (None: the beginning; the present), agents after `after`.

    `limit` bounds the agents. Raises Unavailable when `until` is a moment of another history than the present one: the
    database failed over between the two.
    """
    rows = await conn.fetch(
        _SQL["project_changes"],
        project_id,
        after,
        limit,
        None if since is None else since.snapshot,
        None if since is None else since.taken_at,
        None if since is None else since.timeline,
        None if until is None else until.snapshot,
        None if until is None else until.taken_at,
    )
    mark = Mark(*rows[0][:3])
    if until is not None and until.timeline != mark.timeline:
        raise Unavailable("the database failed over")
    grown = [Growth(row["agent_id"], row["low"], row["high"]) for row in rows if row["agent_id"] is not None]
    last = grown[-1].agent_id if grown else after
    return Found(mark, [item for item in grown if item.high > item.low], len(grown) == limit, last)


async def events(conn: Connection, ranges: Sequence[Growth], limit: int) -> list[tuple[UUID, EventRow]]:
    """Return events of these ranges, agent by agent: at most `limit`, fewer when they are big, at least one if any."""
    rows = await conn.fetch(
        _SQL["events_of_ranges"],
        [item.agent_id for item in ranges],
        [item.low for item in ranges],
        [item.high for item in ranges],
        limit,
        PAGE_BYTES,
    )
    return [(row["agent_id"], EventRow(*tuple(row)[1:])) for row in rows]


async def projects_of(conn: Connection, agent_ids: Sequence[UUID]) -> dict[UUID, UUID]:
    """Return the projects of those agents that exist."""
    return {row["agent_id"]: row["project_id"] for row in await conn.fetch(_SQL["projects_of"], list(agent_ids))}
