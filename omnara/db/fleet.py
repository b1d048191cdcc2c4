"""Queries about which replica serves which machine: open channels, and claims on the pool machines that are driven.

Source: coordination §3 (claims, deaths), §6 (one sweep for all).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("fleet")


class Channel(msgspec.Struct, frozen=True):
    """One open channel: the runtime at its other end, the session that it is, and the machine."""

    runtime_id: UUID
    session_id: UUID
    machine_id: UUID


class MachineClaim(msgspec.Struct, frozen=True):
    """A worker's right to drive a machine's container of one generation."""

    machine_id: UUID
    claim_token: int
    generation: int


async def channels_with_work(connection: Connection, channels: Sequence[Channel]) -> list[UUID]:
    """Return the sessions of those channels that have something to do or are no longer the machine's."""
    rows = await connection.fetch(
        _SQL["channels_with_work"],
        [channel.runtime_id for channel in channels],
        [channel.session_id for channel in channels],
        [channel.machine_id for channel in channels],
    )
    return [row[0] for row in rows]


async def claim_machines(
    connection: Connection,
    worker_id: UUID,
    claim_token: int,
    limit: int,
    reach: Sequence[tuple[str, str]],
    but: Collection[UUID],
) -> list[MachineClaim]:
    """Claim machines that nobody drives, of these (provider, host) pairs, without those of `but`.

    Commits by itself; none for a dead worker.
    """
    providers, hosts = [provider for provider, _ in reach], [host for _, host in reach]
    rows = await connection.fetch(_SQL["claim_machines"], worker_id, claim_token, limit, providers, hosts, list(but))
    return [MachineClaim(row[0], claim_token, row[1]) for row in rows]


async def lost_machines(connection: Connection, worker_id: UUID, claims: Sequence[MachineClaim]) -> list[UUID]:
    """Return the machines among these claims that this worker must let go of."""
    rows = await connection.fetch(
        _SQL["lost_machines"],
        worker_id,
        [claim.machine_id for claim in claims],
        [claim.claim_token for claim in claims],
        [claim.generation for claim in claims],
    )
    return [row[0] for row in rows]


async def stray_machines(connection: Connection, worker_id: UUID, driven: Sequence[UUID]) -> list[MachineClaim]:
    """Return claims of this worker on machines that it does not drive."""
    return [MachineClaim(*row) for row in await connection.fetch(_SQL["stray_machines"], worker_id, list(driven))]


async def release_machines(connection: Connection, worker_id: UUID, claims: Sequence[MachineClaim]) -> list[UUID]:
    """Give claims back; returns the machines that are free now. Commits by itself."""
    rows = await connection.fetch(
        _SQL["release_machines"],
        worker_id,
        [claim.machine_id for claim in claims],
        [claim.claim_token for claim in claims],
    )
    return [row[0] for row in rows]


async def release_machines_of_the_dead(connection: Connection, limit: int) -> list[UUID]:
    """Take the claims of workers that are not live; returns the machines. Commits by itself."""
    return [row[0] for row in await connection.fetch(_SQL["release_machines_of_the_dead"], limit)]


async def disconnect_channels_of_the_dead(connection: Connection, limit: int) -> list[UUID]:
    """Note that the channels of workers that are not live are gone; returns the machines. Commits by itself."""
    return [row[0] for row in await connection.fetch(_SQL["disconnect_channels_of_the_dead"], limit)]


async def extend_driven(connection: Connection, channels: Sequence[Channel], lease_s: float) -> set[UUID]:
    """Extend the leases of these channels' runtimes; returns the sessions that still count. Commits by itself."""
    rows = await connection.fetch(
        _SQL["extend_driven"],
        [channel.runtime_id for channel in channels],
        [channel.session_id for channel in channels],
        lease_s,
    )
    return {row[0] for row in rows}


async def offer_installation_value(connection: Connection, name: str, value: str) -> None:
    """Write a fact of this database unless it is there. Commits by itself."""
    await connection.execute(_SQL["offer_installation_value"], name, value)
