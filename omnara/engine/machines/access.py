"""Who sees a machine and who may change it.

Managers of an organization see and change all its machines. Others, people and keys, see those that a
project of theirs may use, and are forbidden to change them. To everybody else they do not exist.
Source: api.md §3; contract (MachineAccess); DESIGN §2, invariant 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import Decision, OrgAction, ProjectAction, ProjectScope, can
from omnara.db import machines
from omnara.db.connection import Connection
from omnara.db.machines import Access, MachineRow
from omnara.engine.scope import org_in_scope
from omnara.errors import Forbidden, NotFound


class SeenMachine(msgspec.Struct, frozen=True):
    """A machine with what the caller may do and through which grants it sees it."""

    row: MachineRow
    can_manage: bool
    grants: Sequence[Access]


def manages(p: Principal, org_id: UUID) -> bool:
    """Whether the caller manages all machines of the organization."""
    return can(p, OrgAction.MANAGE, org_id) is Decision.ALLOWED


def projects_of(p: Principal, org_id: UUID, action: ProjectAction = ProjectAction.READ) -> list[UUID]:
    """Return the projects of an organization in which the caller may do `action`."""
    return [
        project_id
        for project_id in p.project_grants
        if can(p, action, ProjectScope(org_id, project_id)) is Decision.ALLOWED
    ]


async def seen(connection: Connection, p: Principal, org_id: UUID, machine_id: UUID) -> SeenMachine:
    """Return a machine that the caller sees. Raises NotFound."""
    org_in_scope(p, org_id, OrgAction.READ)
    row = await machines.find(connection, org_id, machine_id)
    if row is None or row.deleted_at is not None:
        raise NotFound("machine")
    grants = await machines.access(connection, machine_id, projects_of(p, org_id))
    if not grants and not manages(p, org_id):
        raise NotFound("machine")
    return SeenMachine(row, manages(p, org_id), grants)


async def managed(connection: Connection, p: Principal, org_id: UUID, machine_id: UUID) -> MachineRow:
    """Return a machine that the caller manages. Raises NotFound, Forbidden."""
    found = await seen(connection, p, org_id, machine_id)
    if not found.can_manage:
        raise Forbidden
    return found.row


async def locked(connection: Connection, p: Principal, org_id: UUID, machine_id: UUID) -> MachineRow:
    """Lock a machine that the caller manages, before anything that runs on it. Raises NotFound, Forbidden."""
    await managed(connection, p, org_id, machine_id)
    await machines.lock(connection, org_id, machine_id)
    return await managed(connection, p, org_id, machine_id)
