"""Machines as people administer them. What runs on them is in `processes`, their daemons are in `runtimes`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.sqlfiles import Queries

_SQL = Queries("machines")


class MachineSummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as lists show it."""

    id: UUID
    org_id: UUID
    source_kind: str
    display_name: str
    description: str
    provider: str
    lifecycle_state: str
    connection_state: str
    connection_reason: str
    last_observed_at: datetime | None
    deleted_at: datetime | None
    created_at: datetime
    updated_at: datetime


class MachineRow(MachineSummaryRow, frozen=True, kw_only=True):
    """A machine. `env`, `secret_env` (names to UUIDs), `metadata` and `failure_report` are JSON text."""

    pool_id: UUID | None
    cwd: str
    env: str
    secret_env: str
    metadata: str
    observed_platform: str | None
    lifecycle_reason_code: str
    lifecycle_reason_message: str
    failure_report: str | None
    next_reconcile_after: datetime | None
    provision_attempts: int
    delete_attempts: int


class NewMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to insert, in the order of the statement's parameters. Objects are JSON text."""

    id: UUID
    org_id: UUID
    display_name: str
    description: str
    cwd: str
    env: str
    secret_env: str
    metadata: str
    idempotency_key: str | None


class MachineScope(msgspec.Struct, frozen=True, kw_only=True):
    """Which machines a caller may list, and which of those it asks for, in the order of the statement's parameters.

    `whole_org`: the caller sees all. `granted_only`: only what one of `project_ids` may use.
    """

    org_id: UUID
    whole_org: bool
    project_ids: Sequence[UUID]
    source_kind: str | None = None
    granted_only: bool = False


class Access(msgspec.Struct, frozen=True, array_like=True):
    """A grant through which somebody sees a machine."""

    project_id: UUID
    grant_id: UUID
    source_kind: str


async def add(connection: Connection, new: NewMachine) -> bool:
    """Insert a machine that somebody will connect; False when its idempotency key is used."""
    return await connection.fetchval(_SQL["add_machine"], *msgspec.structs.astuple(new)) is not None


async def by_key(connection: Connection, org_id: UUID, key: str) -> UUID | None:
    """Return what an idempotency key made, deleted or not."""
    found: UUID | None = await connection.fetchval(_SQL["machine_by_key"], org_id, key)
    return found


async def count(connection: Connection, org_id: UUID) -> int:
    """Return how many machines an organization connected itself."""
    found: int = await connection.fetchval(_SQL["count_machines"], org_id)
    return found


async def lock(connection: Connection, org_id: UUID, machine_id: UUID) -> bool:
    """Lock a machine until the transaction ends, before anything that runs on it; False when there is none."""
    return await connection.fetchval(_SQL["lock_machine"], org_id, machine_id) is not None


async def find(connection: Connection, org_id: UUID, machine_id: UUID) -> MachineRow | None:
    """Return a machine of an organization, also a deleted one."""
    row = await connection.fetchrow(_SQL["find_machine"], org_id, machine_id)
    return None if row is None else MachineRow(**row)


async def access(connection: Connection, machine_id: UUID, project_ids: Collection[UUID]) -> list[Access]:
    """Return the grants of a machine for some projects, oldest first."""
    return [Access(*row) for row in await connection.fetch(_SQL["machine_access"], machine_id, list(project_ids))]


async def list_visible(
    connection: Connection, scope: MachineScope, order: ListOrder
) -> list[tuple[str, MachineSummaryRow, list[Access]]]:
    """Return machines with their sort values and the grants for the scope's projects."""
    rows = await connection.fetch(
        _SQL["list_machines"],
        *order.values(),
        scope.org_id,
        scope.whole_org,
        list(scope.project_ids),
        scope.source_kind,
        scope.granted_only,
    )
    return [_listed(row) for row in rows]


async def change(
    connection: Connection, machine_id: UUID, cwd: str | None, env: str | None, secret_env: str | None
) -> None:
    """Replace what commands on a locked machine find; None leaves a part as it is. Objects are JSON text."""
    await connection.execute(_SQL["change_machine"], machine_id, cwd, env, secret_env)


async def keep_env_secrets(
    connection: Connection, org_id: UUID, secret_ids: Collection[UUID], project_id: UUID | None
) -> set[UUID]:
    """Keep generic secrets until the transaction ends; return those that are the organization's or for the project."""
    rows = await connection.fetch(_SQL["share_env_secrets"], org_id, list(secret_ids), project_id)
    return {row[0] for row in rows}


async def drop_grants(connection: Connection, machine_id: UUID) -> None:
    """Take a locked machine from every project."""
    await connection.execute(_SQL["drop_machine_grants"], machine_id)


async def mark_deleted(connection: Connection, machine_id: UUID, reason_code: str) -> None:
    """Hide a locked machine for good."""
    await connection.execute(_SQL["mark_machine_deleted"], machine_id, reason_code)


async def mark_deleting(connection: Connection, machine_id: UUID, reason_code: str) -> bool:
    """Let the provisioner remove a locked machine of a pool; False when that is under way."""
    return await connection.fetchval(_SQL["mark_machine_deleting"], machine_id, reason_code) is not None


async def connected(connection: Connection, org_id: UUID, limit: int) -> list[UUID]:
    """Return some machines that an organization connected itself."""
    return [row[0] for row in await connection.fetch(_SQL["connected_machines"], org_id, limit)]


async def bindings(connection: Connection, machine_id: UUID, project_id: UUID | None = None) -> list[tuple[UUID, UUID]]:
    """Return (binding, agent) wherever a locked machine is attached, of one project or of all, in order of agents."""
    return [(row[0], row[1]) for row in await connection.fetch(_SQL["machine_bindings"], machine_id, project_id)]


async def release_bindings(connection: Connection, machine_id: UUID) -> None:
    """Detach a locked machine from all agents, which are locked."""
    await connection.execute(_SQL["release_machine_bindings"], machine_id)


async def of_pool(connection: Connection, pool_id: UUID, pool_grant_id: UUID | None = None) -> list[UUID]:
    """Return the machines of a pool, or of one grant of it, that are not being deleted yet, in order of id."""
    rows = await connection.fetch(_SQL["undeleted_pool_machines"], pool_id, pool_grant_id)
    return [row[0] for row in rows]


def summary(row: asyncpg.Record) -> MachineSummaryRow:
    """Return the summary in a row that has all its columns, among others."""
    return MachineSummaryRow(**{name: row[name] for name in MachineSummaryRow.__struct_fields__})


def _listed(row: asyncpg.Record) -> tuple[str, MachineSummaryRow, list[Access]]:
    grants = row["grants"]
    found = [] if grants is None else msgspec.json.decode(grants, type=list[Access])
    return row["key"], summary(row), found
