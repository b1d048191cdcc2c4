"""What the demo counts in the database, through a connection that cannot write."""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("demo")


class LogFaults(msgspec.Struct, frozen=True):
    """Numbers missing in a log, and results beyond the first of a call. Both must be zero."""

    gaps: int
    duplicate_results: int


class StepCount(msgspec.Struct, frozen=True):
    """Steps in one state. `shared_outputs` counts saved model steps that claim an output of another one."""

    state: str
    steps: int
    shared_outputs: int


async def make_read_only(connection: Connection) -> None:
    """Make this session refuse writes for as long as it lives."""
    await connection.execute(_SQL["read_only"])


async def log_faults(connection: Connection, agent_id: UUID) -> LogFaults:
    """Count gaps and duplicates in an agent's log. One statement."""
    row = await connection.fetchrow(_SQL["log_faults"], agent_id)
    assert row is not None
    return LogFaults(*row)


async def steps_by_state(connection: Connection, agent_id: UUID) -> list[StepCount]:
    """Count an agent's steps by state. One statement."""
    return [StepCount(*row) for row in await connection.fetch(_SQL["steps_by_state"], agent_id)]


async def event_ids(connection: Connection, agent_id: UUID) -> dict[int, UUID]:
    """Return the id of every event of an agent by its sequence. One statement."""
    return {row["sequence"]: row["id"] for row in await connection.fetch(_SQL["event_ids"], agent_id)}
