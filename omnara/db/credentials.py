"""Organization keys and personal tokens as their lists show them. Only hashes are stored; no function sees a token."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.accounts import TokenRow
from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("members")


class OrgKeyRow(msgspec.Struct, frozen=True):
    """An organization key; a revoked one has an empty role."""

    id: UUID
    org_id: UUID
    name: str
    token_id: str
    org_role: str
    created_by_user_id: UUID
    created_at: datetime
    updated_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class NewOrgKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key to insert, in the order of the statement's parameters."""

    id: UUID
    org_id: UUID
    name: str
    org_role: str
    token_id: str
    token_hash: str
    created_by_user_id: UUID


async def list_keys(
    connection: Connection, org_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> list[OrgKeyRow]:
    """Return an organization's keys, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    rows = await connection.fetch(_SQL["list_keys"], org_id, time, last_id, limit, None)
    return [OrgKeyRow(*row) for row in rows]


async def find_key(connection: Connection, org_id: UUID, key_id: UUID) -> OrgKeyRow | None:
    """Return a key of an organization, revoked or not."""
    row = await connection.fetchrow(_SQL["list_keys"], org_id, None, None, 1, key_id)
    return None if row is None else OrgKeyRow(*row)


async def add_key(connection: Connection, new: NewOrgKey) -> bool:
    """Insert a key; False when an active one has its name."""
    return await connection.fetchval(_SQL["add_key"], *msgspec.structs.astuple(new)) is not None


async def lock_key(connection: Connection, org_id: UUID, key_id: UUID) -> bool | None:
    """Lock a key until the transaction ends; return whether it is revoked, None when there is none."""
    revoked: bool | None = await connection.fetchval(_SQL["lock_key"], org_id, key_id)
    return revoked


async def change_key(connection: Connection, key_id: UUID, name: str | None, role: str | None) -> bool:
    """Change a locked key; False, and the transaction is lost, when the name is taken."""
    try:
        await connection.execute(_SQL["change_key"], key_id, name, role)
    except asyncpg.UniqueViolationError:
        return False
    return True


async def revoke_key(connection: Connection, key_id: UUID) -> None:
    """Make a locked key worthless; a second time changes nothing."""
    await connection.execute(_SQL["revoke_key"], key_id)


async def list_tokens(
    connection: Connection, user_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> list[TokenRow]:
    """Return a user's personal tokens, revoked ones too, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    return [TokenRow(*row) for row in await connection.fetch(_SQL["list_tokens"], user_id, time, last_id, limit)]


async def count_tokens(connection: Connection, user_id: UUID) -> int:
    """Return how many of a user's tokens work."""
    found: int = await connection.fetchval(_SQL["count_tokens"], user_id)
    return found


async def revoke_token(connection: Connection, user_id: UUID, token_id: UUID) -> TokenRow | None:
    """Make one of a user's tokens worthless; a second time changes nothing. None for an unknown one."""
    row = await connection.fetchrow(_SQL["revoke_token"], user_id, token_id)
    return None if row is None else TokenRow(*row)
