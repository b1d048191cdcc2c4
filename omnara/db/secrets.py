"""Sealed secrets. Values come and go encrypted; only `vault` can open them."""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("secrets")


class SealedRow(msgspec.Struct, frozen=True):
    """A secret's current version, still sealed."""

    id: UUID
    name: str
    version: int
    key_id: str
    wrapped_key: bytes
    nonce: bytes
    ciphertext: bytes


async def insert_secret(
    connection: Connection, secret_id: UUID, org_id: UUID, *, owner_kind: str, name: str, description: str
) -> None:
    """Insert the record of a generic secret; its first version must follow in the same transaction."""
    await connection.execute(_SQL["insert_secret"], secret_id, org_id, owner_kind, name, "generic", description)


async def find_system_secret(connection: Connection, org_id: UUID, name: str) -> UUID | None:
    """Return the secret of this name that the system keeps for an organization."""
    found: UUID | None = await connection.fetchval(_SQL["find_system_secret"], org_id, name)
    return found


async def insert_version(connection: Connection, sealed: SealedRow, payload_keys: list[str]) -> None:
    """Insert a sealed version and make it the current one."""
    await connection.execute(
        _SQL["insert_version"],
        sealed.id,
        sealed.version,
        sealed.key_id,
        sealed.wrapped_key,
        sealed.nonce,
        sealed.ciphertext,
        payload_keys,
    )
    await connection.execute(_SQL["set_current_version"], sealed.id, sealed.version)


async def sealed_by_others(connection: Connection, key_id: str, after: tuple[UUID, int], limit: int) -> list[SealedRow]:
    """Return versions of any secret that another ring key than `key_id` seals, in order after (secret, version)."""
    return [SealedRow(*row) for row in await connection.fetch(_SQL["sealed_by_others"], key_id, *after, limit)]


async def rewrap_version(connection: Connection, row: SealedRow, key_id: str, wrapped_key: bytes) -> None:
    """Replace the wrapped data key of a version; nothing when it is no longer as `row` says."""
    await connection.execute(_SQL["rewrap_version"], row.id, row.version, key_id, wrapped_key, row.key_id)


async def current_version(connection: Connection, secret_id: UUID) -> SealedRow | None:
    """Return a secret's current version, sealed."""
    row = await connection.fetchrow(_SQL["current_version"], secret_id)
    return None if row is None else SealedRow(*row)
