"""Queries that take claims away: from dead workers, from damaged agents, from steps that must not go on."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("recovery")


class LockedClaim(msgspec.Struct, frozen=True):
    """A claimed hot row, locked by this transaction. `worker_state` is None when the workers row is gone."""

    agent_id: UUID
    worker_id: UUID
    epoch: int
    next_sequence: int
    turn_id: UUID | None
    turn_sequence: int
    step_number: int
    batch_sequence: int | None
    open_calls: int
    deaths: int
    worker_state: str | None


class TakenAgent(msgspec.Struct, frozen=True):
    """How one agent is released: its new death count and gate, and the results for its interrupted calls.

    `epoch` is that of the claim that was locked: of another one, nothing is taken.
    `results` holds (event id, call id, payload JSON) in call order.
    """

    agent_id: UUID
    epoch: int
    deaths: int
    gate: str
    results: tuple[tuple[UUID, UUID, str], ...]


async def lock_orphans(connection: Connection, limit: int, after: UUID) -> list[LockedClaim]:
    """Lock claims of workers that are not live, in order from `after` on, skipping locked rows.

    Call inside a transaction.
    """
    rows = await connection.fetch(_SQL["lock_orphans"], limit, after)
    return [LockedClaim(*row) for row in rows]


async def lock_claim(
    connection: Connection, agent_id: UUID, worker_id: UUID, claim_token: int, epoch: int
) -> LockedClaim | None:
    """Lock one claim under its fence; None when it has moved on. Call inside a transaction."""
    row = await connection.fetchrow(_SQL["lock_claim"], agent_id, worker_id, claim_token, epoch)
    return None if row is None else LockedClaim(*row)


async def running_calls(connection: Connection, claims: Sequence[LockedClaim]) -> list[tuple[UUID, UUID]]:
    """Return (agent, call) of the running calls of locked claims, in call order per agent."""
    batches = [(claim.agent_id, claim.batch_sequence) for claim in claims if claim.batch_sequence is not None]
    if not batches:
        return []
    rows = await connection.fetch(_SQL["running_calls"], [b[0] for b in batches], [b[1] for b in batches])
    return [(row[0], row[1]) for row in rows]


async def started_steps(connection: Connection, claims: Sequence[LockedClaim]) -> dict[UUID, str]:
    """Return the kind of the step that began and was not saved, by agent."""
    rows = await connection.fetch(
        _SQL["started_steps"], [claim.agent_id for claim in claims], [claim.step_number for claim in claims]
    )
    return {row[0]: row[2] for row in rows}


async def take_away(
    connection: Connection, agents: Sequence[TakenAgent], step_state: str
) -> dict[UUID, tuple[int, str]]:
    """Release locked claims, write the interrupted results, close the started steps as `step_state`.

    Returns (sequence of the first result, gate) by agent. Call inside the transaction that locked the rows.
    """
    results = [(agent.agent_id, position, *result) for agent in agents for position, result in enumerate(agent.results)]
    rows = await connection.fetch(
        _SQL["take_away"],
        [agent.agent_id for agent in agents],
        [len(agent.results) for agent in agents],
        [agent.deaths for agent in agents],
        [agent.gate for agent in agents],
        [r[0] for r in results],
        [r[1] for r in results],
        [r[2] for r in results],
        [r[3] for r in results],
        [r[4] for r in results],
        step_state,
        [agent.epoch for agent in agents],
    )
    return {row[0]: (row[1], row[3]) for row in rows}


async def quarantine_agent(
    connection: Connection,
    fence: tuple[UUID, UUID, int, int],
    *,
    void: Sequence[tuple[int, int]],
    event_id: UUID,
    turn_id: UUID,
    payload: str,
    meta: str,
    error: str,
) -> int | None:
    """Close an agent's gate as crashed under its fence (agent, worker, token, epoch); None when the claim moved on.

    `void`: half-open ranges of sequences. Returns the sequence of the event that tells the reader.
    Commits by itself.
    """
    ranges = [asyncpg.Range(first, until) for first, until in void]
    row = await connection.fetchrow(_SQL["quarantine_agent"], *fence, ranges, event_id, turn_id, payload, meta, error)
    return None if row is None else row[1]
