"""Grants of single machines: which of an organization's machines a project's agents may use.

A project gets a machine from somebody who gives rights in the project and who already has the machine: a manager of the
organization, or one who gives rights in another project that has it. Seeing it there is not enough, since a grant lets
commands run on it. Source: api.md §3, §8; contract (createProjectMachineGrant).
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import machine_grants, machines
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.machine_grants import MachineGrantRow, NewMachineGrant
from omnara.db.machines import MachineRow, MachineSummaryRow
from omnara.engine.deps import Deps
from omnara.engine.machines.access import projects_of, seen
from omnara.engine.machines.environment import checked_description, stored_metadata
from omnara.engine.scope import project_in_scope
from omnara.errors import Forbidden, IdempotencyKeyConflict, InvalidRequest
from omnara.ids import new_uuid


class CreatedMachineGrant(msgspec.Struct, frozen=True):
    """A grant with its machine; not `created` when the key had made it before."""

    created: bool
    row: MachineGrantRow
    machine: MachineRow


class ListedMachineGrant(msgspec.Struct, frozen=True):
    """A grant with its machine."""

    row: MachineGrantRow
    machine: MachineSummaryRow


async def create_grant(
    deps: Deps,
    p: Principal,
    project: ProjectScope,
    machine_id: UUID,
    description: str,
    metadata: Mapping[str, str],
    key: str | None,
) -> CreatedMachineGrant:
    """Let a project use a machine. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest (also for a machine of a pool), IdempotencyKeyConflict for a key that
    made something else, and without a key for a machine that the project may use already.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)
    new = NewMachineGrant(
        id=new_uuid(),
        org_id=project.org_id,
        project_id=project.project_id,
        machine_id=machine_id,
        description=checked_description(description),
        metadata=stored_metadata(metadata),
        idempotency_key=key,
    )

    async def work(connection: Connection) -> CreatedMachineGrant:
        machine = await _given_away(connection, p, project.org_id, machine_id)
        if await machine_grants.add(connection, new):
            row = await machine_grants.find(connection, project.project_id, grant_id=new.id)
            assert row is not None, "it was inserted in this transaction"
            return CreatedMachineGrant(True, row, machine)
        row = None if key is None else await machine_grants.find(connection, project.project_id, key=key)
        if row is None:
            raise IdempotencyKeyConflict("the project may use the machine already")
        if row.deleted_at is not None or not _same(row, new):
            raise IdempotencyKeyConflict
        return CreatedMachineGrant(False, row, machine)

    return await deps.db.run(work)


async def list_grants(
    deps: Deps, p: Principal, project: ProjectScope, order: ListOrder
) -> list[tuple[str, ListedMachineGrant]]:
    """Return a project's explicit grants with sort values; one more than the page when there are more."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        rows = await machine_grants.list_grants(connection, project.project_id, order)
    return [(key, ListedMachineGrant(row, machine)) for key, row, machine in rows]


async def _given_away(connection: Connection, p: Principal, org_id: UUID, machine_id: UUID) -> MachineRow:
    """Lock a machine that the caller may give to a project."""
    await machines.lock(connection, org_id, machine_id)
    found = await seen(connection, p, org_id, machine_id)
    rights = projects_of(p, org_id, ProjectAction.ACCESS)
    if not found.can_manage and not any(grant.project_id in rights for grant in found.grants):
        raise Forbidden
    if found.row.source_kind != "byo":
        raise InvalidRequest("machines of pools are granted with their pool")
    return found.row


def _same(row: MachineGrantRow, new: NewMachineGrant) -> bool:
    if (row.machine_id, row.description) != (new.machine_id, new.description):
        return False
    return bool(msgspec.json.decode(row.metadata) == msgspec.json.decode(new.metadata))
