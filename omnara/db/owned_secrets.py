"""Secrets that organizations, projects and users keep: records, grants and lists. No function here sees a value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.accounts import ProjectRow
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.sqlfiles import Queries

_SQL = Queries("secrets")


class SecretRow(msgspec.Struct, frozen=True):
    """A secret as it is shown. `metadata` is JSON text."""

    id: UUID
    org_id: UUID
    owner_kind: str
    owner_project_id: UUID | None
    owner_user_id: UUID | None
    name: str
    kind: str
    metadata: str
    current_version: int
    payload_keys: list[str]
    created_at: datetime
    updated_at: datetime


class SecretGrantRow(msgspec.Struct, frozen=True):
    """A project's right to use a secret."""

    id: UUID
    secret_id: UUID
    project_id: UUID
    created_at: datetime


class NewSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret's record to insert. `metadata` is JSON text."""

    id: UUID
    org_id: UUID
    owner_kind: str
    owner_project_id: UUID | None
    owner_user_id: UUID | None
    name: str
    kind: str
    metadata: str


class SecretScope(msgspec.Struct, frozen=True, kw_only=True):
    """Which secrets a caller may list, and which of those it asks for. `metadata` is JSON text to be contained."""

    org_id: UUID
    whole_org: bool
    project_ids: Sequence[UUID]
    user_id: UUID | None
    kind: str | None = None
    owner_kind: str | None = None
    owner_project_id: UUID | None = None
    metadata: str | None = None


class AvailableScope(msgspec.Struct, frozen=True, kw_only=True):
    """Which of a project's usable secrets are asked for. `metadata` is JSON text to be contained."""

    org_id: UUID
    project_id: UUID
    kind: str | None = None
    owner_kind: str | None = None
    source: str | None = None
    metadata: str | None = None
    secret_id: UUID | None = None


async def add(connection: Connection, new: NewSecret) -> bool:
    """Insert a secret's record; False when its owner has one of this name. A version must follow at once."""
    return await connection.fetchval(_SQL["add_owned_secret"], *msgspec.structs.astuple(new)) is not None


async def count(connection: Connection, org_id: UUID) -> int:
    """Return how many secrets an organization has, its projects' and users' included."""
    found: int = await connection.fetchval(_SQL["count_secrets"], org_id)
    return found


async def find(connection: Connection, org_id: UUID, secret_id: UUID) -> SecretRow | None:
    """Return a secret of an organization."""
    row = await connection.fetchrow(_SQL["owned_secret"], org_id, secret_id)
    return None if row is None else SecretRow(*row)


async def lock(connection: Connection, org_id: UUID, secret_id: UUID) -> bool:
    """Lock a secret until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["lock_owned_secret"], org_id, secret_id) is not None


async def keep_for_use(connection: Connection, org_id: UUID, secret_id: UUID) -> bool:
    """Keep a generic secret owned by an organization until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["share_generic_secret"], org_id, secret_id) is not None


async def change(connection: Connection, secret_id: UUID, name: str | None, metadata: str | None) -> bool:
    """Change a locked secret's record; False, and the transaction is lost, when the name is taken."""
    try:
        await connection.execute(_SQL["change_secret"], secret_id, name, metadata)
    except asyncpg.UniqueViolationError:
        return False
    return True


async def in_use(connection: Connection, org_id: UUID, secret_id: UUID) -> str | None:
    """Return what kind of thing uses a locked secret of an organization, None when nothing does."""
    used: str | None = await connection.fetchval(_SQL["secret_in_use"], secret_id, org_id)
    return used


async def destroy(connection: Connection, secret_id: UUID) -> None:
    """Destroy a locked secret's values and grants for good, and hide its record."""
    for statement in ("drop_grants", "drop_versions", "mark_deleted"):
        await connection.execute(_SQL[statement], secret_id)


async def list_owned(connection: Connection, scope: SecretScope, order: ListOrder) -> list[tuple[str, SecretRow]]:
    """Return secrets with their sort values."""
    rows = await connection.fetch(_SQL["list_secrets"], *order.values(), *_scope_values(scope))
    return [(row[0], SecretRow(*row[1:])) for row in rows]


async def list_available(
    connection: Connection, scope: AvailableScope, order: ListOrder
) -> list[tuple[str, SecretRow, UUID | None]]:
    """Return what a project may use, with sort values and, for granted ones, the grant."""
    rows = await connection.fetch(_SQL["list_available_secrets"], *order.values(), *msgspec.structs.astuple(scope))
    return [(row[0], SecretRow(*row[1:-1]), row[-1]) for row in rows]


async def add_grant(connection: Connection, grant_id: UUID, secret_id: UUID, project_id: UUID) -> SecretGrantRow | None:
    """Let a project use a locked secret; None when it may already."""
    row = await connection.fetchrow(_SQL["add_grant"], grant_id, secret_id, project_id)
    return None if row is None else SecretGrantRow(*row)


async def drop_grant(connection: Connection, secret_id: UUID, grant_id: UUID) -> bool:
    """Take a secret from a project; False when there is no such grant."""
    return await connection.fetchval(_SQL["drop_grant"], secret_id, grant_id) is not None


async def list_grants(
    connection: Connection, secret_id: UUID, order: ListOrder
) -> list[tuple[str, SecretGrantRow, ProjectRow]]:
    """Return the grants of a secret with sort values and projects."""
    rows = await connection.fetch(_SQL["list_grants"], *order.values(), secret_id)
    return [(row[0], SecretGrantRow(*row[1:5]), ProjectRow(row["project_id"], *row[5:9])) for row in rows]


def _scope_values(scope: SecretScope) -> tuple[object, ...]:
    return (
        scope.org_id,
        scope.whole_org,
        list(scope.project_ids),
        scope.user_id,
        scope.kind,
        scope.owner_kind,
        scope.owner_project_id,
        scope.metadata,
    )
