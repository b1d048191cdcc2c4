"""What projects may use of an organization's machines, given one by one. Those of pools come with their machines."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.machines import MachineSummaryRow, summary
from omnara.db.sqlfiles import Queries

_SQL = Queries("machine_grants")


class MachineGrantRow(msgspec.Struct, frozen=True):
    """A project's right to use a machine. `metadata` is JSON text."""

    id: UUID
    org_id: UUID
    project_id: UUID
    machine_id: UUID
    source_kind: str
    pool_grant_id: UUID | None
    description: str
    metadata: str
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None


class NewMachineGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A grant to insert, in the order of the statement's parameters."""

    id: UUID
    org_id: UUID
    project_id: UUID
    machine_id: UUID
    description: str = ""
    metadata: str = "{}"
    idempotency_key: str | None = None


async def add(connection: Connection, new: NewMachineGrant) -> bool:
    """Let a project use a locked machine; False when it may already, or when the idempotency key is used."""
    return await connection.fetchval(_SQL["add_machine_grant"], *msgspec.structs.astuple(new)) is not None


async def find(
    connection: Connection, project_id: UUID, *, grant_id: UUID | None = None, key: str | None = None
) -> MachineGrantRow | None:
    """Return a project's grant by its id or its idempotency key; by key also a deleted one."""
    row = await connection.fetchrow(_SQL["find_machine_grant"], project_id, grant_id, key)
    return None if row is None else MachineGrantRow(*row)


async def list_grants(
    connection: Connection, project_id: UUID, order: ListOrder
) -> list[tuple[str, MachineGrantRow, MachineSummaryRow]]:
    """Return a project's explicit grants with their sort values and machines."""
    rows = await connection.fetch(_SQL["list_machine_grants"], *order.values(), project_id)
    return [(row["key"], _listed(row), summary(row)) for row in rows]


async def drop(connection: Connection, grant_id: UUID) -> bool:
    """Take a locked machine from a project; False when that was done."""
    return await connection.fetchval(_SQL["drop_machine_grant"], grant_id) is not None


async def of_project(connection: Connection, project_id: UUID, limit: int) -> list[UUID]:
    """Return some explicit grants of a project."""
    return [row[0] for row in await connection.fetch(_SQL["project_machine_grants"], project_id, limit)]


def _listed(row: asyncpg.Record) -> MachineGrantRow:
    return MachineGrantRow(
        id=row["grant_id"],
        org_id=row["org_id"],
        project_id=row["project_id"],
        machine_id=row["machine_id"],
        source_kind=row["grant_source_kind"],
        pool_grant_id=row["pool_grant_id"],
        description=row["grant_description"],
        metadata=row["grant_metadata"],
        created_at=row["grant_created_at"],
        updated_at=row["grant_updated_at"],
        deleted_at=row["grant_deleted_at"],
    )
