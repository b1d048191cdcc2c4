"""Queries on the hot row `agent_sched`: claiming, and looking at claims and at what waits to be claimed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from omnara.db.connection import Connection, Row
from omnara.db.sqlfiles import Queries
from omnara.domain.claim import Claim, ClaimState, HeldClaim
from omnara.domain.step import WaitingInput

_SQL = Queries("sched")

ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)
"""A lower bound of the claim scan that leaves nothing out."""
TOLD_BYTES = 8192
"""Inputs whose stored content is longer do not travel with the claim: the run reads them when it needs them."""
NO_PROJECT = UUID(int=0)
"""Comes before every project."""
TOLD_INPUTS = 2
"""So many waiting inputs travel with the claim; a third one says that there are more."""


CLAIM_LONGEST: Final = f"with {_SQL['live']}, {_SQL['claim_longest']} {_SQL['claim']}"
CLAIM_IN_TURN: Final = f"with recursive {_SQL['live']}, {_SQL['claim_in_turn']} {_SQL['claim']}"


async def claim_agents(
    connection: Connection, worker_id: UUID, *, limit: int, since: datetime, token: int, suspects: bool
) -> list[Claim]:
    """Claim up to `limit` ready agents, oldest first. Commits by itself, synchronously (coordination §4).

    `since` bounds the index scan; `token` is 63 random bits, new for each call. Claims nothing when the worker is not
    live. An exception other than a definite SQL error leaves open whether agents were claimed: reconcile finds out.
    """
    rows = await connection.fetch(CLAIM_LONGEST, worker_id, limit, since, token, TOLD_BYTES, suspects)
    return [_claim(row) for row in rows]


async def claim_in_turn(connection: Connection, worker_id: UUID, *, limit: int, after: UUID, token: int) -> list[Claim]:
    """As `claim_agents`, but equal shares of the next projects after `after` in order of id, and no suspects.

    Fewer than `limit` may come back although more are ready: some projects have less than their share. None come back
    when no later project has ready agents: begin again at `NO_PROJECT`.
    """
    rows = await connection.fetch(CLAIM_IN_TURN, worker_id, limit, after, token, TOLD_BYTES)
    return [_claim(row) for row in rows]


async def own_claims(connection: Connection, worker_id: UUID) -> list[HeldClaim]:
    """Return every claim that the database says this worker holds."""
    rows = await connection.fetch(_SQL["own_claims"], worker_id)
    return [HeldClaim(*row) for row in rows]


async def read_claim(
    connection: Connection, agent_id: UUID, *, step_number: int | None, event_id: UUID | None, from_sequence: int
) -> ClaimState | None:
    """Return the hot row with the evidence for a save of unknown outcome, or None when the agent is not there."""
    row = await connection.fetchrow(_SQL["read_claim"], agent_id, step_number, event_id, from_sequence)
    return None if row is None else ClaimState(*row)


async def oldest_waiter(connection: Connection, *, at_least_s: float, since: datetime) -> float | None:
    """Age in seconds of the longest-ready agent if at least `at_least_s`, else None. Bounded scan (coordination §7)."""
    age: float | None = await connection.fetchval(_SQL["oldest_waiter"], at_least_s, since)
    return age


async def queue_depth(connection: Connection) -> tuple[int, float]:
    """Return how many agents are ready and unclaimed, and the age of the oldest in seconds."""
    row = await connection.fetchrow(_SQL["queue_depth"])
    return (0, 0.0) if row is None else (row[0], row[1])


async def agents_by_status(connection: Connection) -> dict[str, int]:
    """Return the number of agents by derived status. Reads the whole hot table: for metrics once a minute."""
    rows = await connection.fetch(_SQL["agents_by_status"])
    return {row[0]: row[1] for row in rows}


def _claim(row: Row) -> Claim:
    values = dict(row)
    values["void"] = _ranges(values["void"])
    values["waiting"] = _told(values["waiting"])
    return Claim(**values)


def _told(rows: Sequence[Row]) -> tuple[WaitingInput, ...] | None:
    if len(rows) > TOLD_INPUTS or any(row[3] is None for row in rows):
        return None
    return tuple(WaitingInput(row[0], row[1], row[2], row[3], row[4], row[5]) for row in rows)


def _ranges(multirange: Any) -> tuple[tuple[int, int], ...]:
    if not multirange:
        return ()
    return tuple(
        (part.lower if part.lower is not None else 0, part.upper if part.upper is not None else 2**62)
        for part in multirange
    )
