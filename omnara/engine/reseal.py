"""Rotation of the key ring: every stored secret comes under the active key, and the others can leave the ring.

Only data keys are wrapped anew, so it is quick, changes no ciphertext and disturbs nobody who reads meanwhile.
Source: field-reports B23.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.db import accounts, secrets
from omnara.db.connection import Connection
from omnara.db.pool import ApiPool
from omnara.db.secrets import SealedRow
from omnara.engine.bootstrap import CHECK_NAME
from omnara.errors import ConfigurationError
from omnara.vault import KeyRing, Sealed, SecretUnreadable, check_value, reseal, secret_aad, verify_check_value

BATCH: Final = 100
"""Versions of one transaction."""


class Resealed(msgspec.Struct, frozen=True):
    """How many versions came under the active key, which secrets could not be read (they stay as they are), and which
    keys nothing in the database needs any more.
    """

    moved: int
    unreadable: tuple[str, ...]
    retired: tuple[str, ...]


async def reseal_secrets(db: ApiPool, ring: KeyRing) -> Resealed:
    """Bring all versions of all secrets under the ring's active key. A transaction for each hundred; may be repeated.

    When nothing is left under another key, the database forgets the others' check values: from then on a ring without
    them is accepted. All replicas must already seal with the active key. Raises WrongKeyRing, ConfigurationError for a
    database that no server has set up, Unavailable.
    """
    await db.run(lambda connection: _checked(connection, ring))
    moved, unreadable = 0, list[str]()
    last: tuple[UUID, int] | None = (UUID(int=0), 0)
    while last is not None:
        after = last

        async def batch(connection: Connection, after: tuple[UUID, int] = after) -> list[tuple[SealedRow, bool]]:
            rows = await secrets.sealed_by_others(connection, ring.active, after, BATCH)
            return [(row, await _rewrap(connection, ring, row)) for row in rows]

        done = await db.run(batch)
        moved += sum(readable for _, readable in done)
        unreadable += [row.name for row, readable in done if not readable]
        last = (done[-1][0].id, done[-1][0].version) if done else None
    return Resealed(moved, tuple(unreadable), await db.run(lambda connection: _retire(connection, ring)))


async def _checked(connection: Connection, ring: KeyRing) -> None:
    stored = await accounts.installation_value(connection, CHECK_NAME)
    if stored is None:
        raise ConfigurationError("no server has set this database up yet")
    verify_check_value(stored, ring)


async def _rewrap(connection: Connection, ring: KeyRing, row: SealedRow) -> bool:
    sealed = Sealed(row.key_id, row.wrapped_key, row.nonce, row.ciphertext)
    try:
        wrapped = reseal(ring, sealed, secret_aad(row.id, row.version))
    except SecretUnreadable:
        return False
    await secrets.rewrap_version(connection, row, wrapped.key_id, wrapped.wrapped_key)
    return True


async def _retire(connection: Connection, ring: KeyRing) -> tuple[str, ...]:
    if await secrets.sealed_by_others(connection, ring.active, (UUID(int=0), 0), 1):
        return ()
    active = KeyRing({ring.active: ring.keys[ring.active]}, ring.active)
    await accounts.set_installation_value(connection, CHECK_NAME, check_value(active))
    return tuple(sorted(ring.keys.keys() - active.keys.keys()))
