"""Who belongs to an organization, and the roles of members and keys in its projects."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.orgs import MemberRow
from omnara.db.sqlfiles import Queries

_SQL = Queries("members")

_ERASURE: Final = (
    "revoke_user_tokens",
    "drop_user_secret_grants",
    "destroy_user_secrets",
    "mark_user_secrets_deleted",
    "erase_user",
)


class OrgMemberRow(msgspec.Struct, frozen=True):
    """A member as a list shows it; `email` is empty when there is none."""

    id: UUID
    email: str
    name: str
    role: str
    created_at: datetime


class ProjectRoleRow(msgspec.Struct, frozen=True):
    """A role in a project."""

    project_id: UUID
    project_name: str
    role: str
    created_at: datetime


async def list_members(connection: Connection, org_id: UUID, order: ListOrder) -> list[tuple[str, OrgMemberRow]]:
    """Return members with their sort values."""
    rows = await connection.fetch(_SQL["list_members"], *order.values(), org_id)
    return [(row[0], OrgMemberRow(*row[1:])) for row in rows]


async def lock_owners(connection: Connection, org_id: UUID) -> list[UUID]:
    """Lock the owners of an organization until the transaction ends, and return them."""
    return [row[0] for row in await connection.fetch(_SQL["owners"], org_id)]


async def set_role(connection: Connection, org_id: UUID, user_id: UUID, role: str) -> MemberRow:
    """Change a member's role. The membership is there."""
    row = await connection.fetchrow(_SQL["set_role"], org_id, user_id, role)
    assert row is not None, "the membership was read in this transaction"
    return MemberRow(*row)


async def remove(connection: Connection, org_id: UUID, user_id: UUID) -> None:
    """End a membership, with all roles in the organization's projects."""
    await connection.execute(_SQL["drop_project_roles"], org_id, user_id)
    await connection.execute(_SQL["drop_member"], org_id, user_id)


async def erase_user(connection: Connection, user_id: UUID) -> None:
    """Forget a locked user without memberships: tokens are worthless, own secrets destroyed, the name is gone."""
    for statement in _ERASURE:
        await connection.execute(_SQL[statement], user_id)


async def project_roles(connection: Connection, org_id: UUID, holder_id: UUID, *, user: bool) -> list[ProjectRoleRow]:
    """Return the roles of a member, or of a key, by project name."""
    query = _SQL["user_projects" if user else "key_projects"]
    return [ProjectRoleRow(*row) for row in await connection.fetch(query, org_id, holder_id)]


async def drop_project_role(connection: Connection, project_id: UUID, holder_id: UUID, *, user: bool) -> bool:
    """Take a role in a project from a member or a key; False when there was none."""
    query = _SQL["drop_project_role" if user else "drop_key_project_role"]
    return await connection.fetchval(query, project_id, holder_id) is not None
