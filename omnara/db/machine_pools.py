"""Pools of machines, and what projects may use of them. Objects are JSON text, secrets in them UUIDs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.sqlfiles import Queries

_SQL = Queries("machine_pools")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one machine and caps of all together, in cores and MiB; None leaves a matter open."""

    default_machine_cpu: int | None = None
    default_machine_memory_mb: int | None = None
    max_total_cpu: int | None = None
    max_total_memory_mb: int | None = None
    min_machine_cpu: int | None = None
    min_machine_memory_mb: int | None = None
    max_machine_cpu: int | None = None
    max_machine_memory_mb: int | None = None


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of a pool that may change, in the order of the statements' parameters; `sizes` come last."""

    name: str
    description: str = ""
    provider_config: str = "{}"
    provider_auth_secret_id: UUID | None = None
    default_machine_env: str = "{}"
    default_machine_secret_env: str = "{}"  # noqa: S105 - an empty object
    default_machine_provider_options: str = "{}"
    default_cwd: str = ""
    runtime_protection_enabled: bool = False
    metadata: str = "{}"
    max_total_machines: int
    delete_after_idle_minutes: int | None = None
    sizes: Sizes


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool."""

    id: UUID
    org_id: UUID
    provider: str
    management_kind: str
    created_at: datetime
    updated_at: datetime
    settings: PoolSettings


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the machines of a pool that are not deleted take up."""

    machines: int
    cpu: int
    memory_mb: int


class PoolSummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of a listed grant."""

    name: str
    management_kind: str
    description: str
    provider: str
    created_at: datetime
    updated_at: datetime


class PoolOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """All of a pool grant that may change, in the order of the statements' parameters; `sizes` come last.

    Idle minutes: 0 switches off what the pool says, None follows it.
    """

    description: str = ""
    default_machine_env_overlay: str = "{}"
    default_machine_secret_env_overlay: str = "{}"  # noqa: S105 - an empty object
    default_machine_provider_options_overlay: str = "{}"
    default_cwd: str = ""
    metadata: str = "{}"
    max_total_machines: int | None = None
    delete_after_idle_minutes: int | None = None
    sizes: Sizes


class PoolGrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A project's right to machines of a pool."""

    id: UUID
    org_id: UUID
    project_id: UUID
    pool_id: UUID
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None
    overrides: PoolOverrides


class NewPoolGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A grant to insert, in the order of the statement's parameters."""

    id: UUID
    org_id: UUID
    project_id: UUID
    pool_id: UUID
    idempotency_key: str | None


async def add(connection: Connection, pool_id: UUID, org_id: UUID, provider: str, settings: PoolSettings) -> bool:
    """Insert a pool; False when its organization has one of this name."""
    values = _values(settings)
    return await connection.fetchval(_SQL["add_pool"], pool_id, org_id, provider, *values) is not None


async def count(connection: Connection, org_id: UUID) -> int:
    """Return how many pools an organization has."""
    found: int = await connection.fetchval(_SQL["count_pools"], org_id)
    return found


async def lock(connection: Connection, org_id: UUID, pool_id: UUID) -> bool:
    """Lock a pool until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["lock_pool"], org_id, pool_id) is not None


async def find(
    connection: Connection, org_id: UUID, *, pool_id: UUID | None = None, name: str | None = None
) -> PoolRow | None:
    """Return a pool of an organization by its id or by its name."""
    row = await connection.fetchrow(_SQL["find_pool"], org_id, pool_id, name)
    return None if row is None else _pool(row)


async def list_pools(connection: Connection, org_id: UUID, order: ListOrder) -> list[tuple[str, PoolRow, PoolUsage]]:
    """Return the pools of an organization with their sort values and what is used of them."""
    rows = await connection.fetch(_SQL["list_pools"], *order.values(), org_id)
    return [(row["key"], _pool(row), _taken(PoolUsage, row)) for row in rows]


async def change(connection: Connection, pool_id: UUID, settings: PoolSettings) -> bool:
    """Replace the settings of a locked pool; False, and the transaction is lost, when the name is taken."""
    try:
        await connection.execute(_SQL["change_pool"], pool_id, *_values(settings))
    except asyncpg.UniqueViolationError:
        return False
    return True


async def mark_deleted(connection: Connection, pool_id: UUID) -> None:
    """Hide a locked pool and take it from every project."""
    await connection.execute(_SQL["drop_pool_grants"], pool_id)
    await connection.execute(_SQL["mark_pool_deleted"], pool_id)


async def add_grant(connection: Connection, new: NewPoolGrant, overrides: PoolOverrides) -> bool:
    """Let a project use a locked pool; False when it may already, or when the idempotency key is used."""
    values = (*msgspec.structs.astuple(new), *_values(overrides))
    return await connection.fetchval(_SQL["add_pool_grant"], *values) is not None


async def find_grant(
    connection: Connection,
    project_id: UUID,
    *,
    grant_id: UUID | None = None,
    pool_id: UUID | None = None,
    key: str | None = None,
) -> PoolGrantRow | None:
    """Return a project's grant by its id, its pool or its idempotency key; by key also a deleted one."""
    row = await connection.fetchrow(_SQL["find_pool_grant"], project_id, grant_id, pool_id, key)
    return None if row is None else _grant(row)


async def list_grants(
    connection: Connection, project_id: UUID, order: ListOrder
) -> list[tuple[str, PoolGrantRow, PoolSummaryRow]]:
    """Return the pool grants of a project with their sort values and pools."""
    rows = await connection.fetch(_SQL["list_pool_grants"], *order.values(), project_id)
    return [(row["key"], _grant(row), _granted_pool(row)) for row in rows]


async def change_grant(connection: Connection, grant_id: UUID, overrides: PoolOverrides) -> None:
    """Replace what a grant says, whose pool is locked."""
    await connection.execute(_SQL["change_pool_grant"], grant_id, *_values(overrides))


async def drop_grant(connection: Connection, project_id: UUID, grant_id: UUID) -> UUID | None:
    """Take a pool from a project; return the pool, None when there is no such grant."""
    found: UUID | None = await connection.fetchval(_SQL["drop_pool_grant"], project_id, grant_id)
    return found


async def granted_to(connection: Connection, pool_id: UUID, project_ids: Collection[UUID]) -> bool:
    """Whether one of some projects may use a pool."""
    return bool(await connection.fetchval(_SQL["pool_granted_to"], pool_id, list(project_ids)))


async def of_org(connection: Connection, org_id: UUID, limit: int) -> list[UUID]:
    """Return some pools of an organization."""
    return [row[0] for row in await connection.fetch(_SQL["org_pools"], org_id, limit)]


async def grants_of_project(connection: Connection, project_id: UUID, limit: int) -> list[UUID]:
    """Return some pool grants of a project."""
    return [row[0] for row in await connection.fetch(_SQL["project_pool_grants"], project_id, limit)]


def _values(settings: PoolSettings | PoolOverrides) -> tuple[object, ...]:
    return (*msgspec.structs.astuple(settings)[:-1], *msgspec.structs.astuple(settings.sizes))


def _taken(kind: Any, row: asyncpg.Record, **more: Any) -> Any:
    """A struct of those columns of a row that have its fields' names."""
    return kind(**{name: row[name] for name in kind.__struct_fields__ if name not in more}, **more)


def _pool(row: asyncpg.Record) -> PoolRow:
    settings = _taken(PoolSettings, row, sizes=_taken(Sizes, row))
    found: PoolRow = _taken(PoolRow, row, settings=settings)
    return found


def _grant(row: asyncpg.Record) -> PoolGrantRow:
    overrides = _taken(PoolOverrides, row, sizes=_taken(Sizes, row))
    found: PoolGrantRow = _taken(PoolGrantRow, row, overrides=overrides)
    return found


def _granted_pool(row: asyncpg.Record) -> PoolSummaryRow:
    return PoolSummaryRow(
        name=row["name"],
        management_kind=row["management_kind"],
        description=row["pool_description"],
        provider=row["provider"],
        created_at=row["pool_created_at"],
        updated_at=row["pool_updated_at"],
    )
