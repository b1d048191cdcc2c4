"""Tokens of machines' daemons as their owner sees them. Only hashes are stored; no function here sees a token."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("machines")


class DaemonTokenRow(msgspec.Struct, frozen=True):
    """A token without its text. `metadata` is JSON text."""

    id: UUID
    org_id: UUID
    machine_id: UUID
    name: str
    metadata: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    revoke_reason: str


class NewDaemonToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token to insert, in the order of the statement's parameters."""

    id: UUID
    org_id: UUID
    machine_id: UUID
    name: str
    metadata: str
    token_hash: str


async def add(connection: Connection, new: NewDaemonToken) -> None:
    """Insert a token of a locked machine."""
    await connection.execute(_SQL["add_token"], *msgspec.structs.astuple(new))


async def count(connection: Connection, machine_id: UUID) -> int:
    """Return how many tokens of a locked machine work."""
    found: int = await connection.fetchval(_SQL["count_tokens"], machine_id)
    return found


async def trim(connection: Connection, machine_id: UUID, most: int, reason: str) -> None:
    """Make all but the newest `most` tokens of a locked machine worthless."""
    await connection.execute(_SQL["trim_tokens"], machine_id, most, reason)


async def list_tokens(
    connection: Connection, machine_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> list[DaemonTokenRow]:
    """Return a machine's tokens, revoked ones too, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    rows = await connection.fetch(_SQL["list_tokens"], machine_id, time, last_id, limit, None)
    return [DaemonTokenRow(*row) for row in rows]


async def find(connection: Connection, machine_id: UUID, token_id: UUID) -> DaemonTokenRow | None:
    """Return a token of a machine, revoked or not."""
    row = await connection.fetchrow(_SQL["list_tokens"], machine_id, None, None, 1, token_id)
    return None if row is None else DaemonTokenRow(*row)


async def revoke(connection: Connection, machine_id: UUID, token_id: UUID, reason: str) -> bool:
    """Make a token of a locked machine worthless; False when it was already."""
    return await connection.fetchval(_SQL["revoke_token"], machine_id, token_id, reason) is not None
