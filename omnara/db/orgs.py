"""Making and unmaking organizations and projects, and what goes with each when it is deleted.

Deletion hides rows and destroys values: logs and names stay for the journal, sealed secrets do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara.db.accounts import ProjectRow
from omnara.db.agents import AgentRow
from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("orgs")

_PROJECT_HIDING: Final = ("drop_project_members", "drop_project_keys", "mark_project_deleted")
_PROJECT_TEARDOWN: Final = (
    "drop_project_model_grants",
    "drop_project_secret_grants",
    "destroy_project_secrets",
    "mark_project_secrets_deleted",
    "mark_project_empty",
)
_ORG_HIDING: Final = ("revoke_org_keys", "mark_org_deleted", "mark_org_emptying")
_ORG_TEARDOWN: Final = (
    "mark_org_models_deleted",
    "mark_org_providers_deleted",
    "drop_org_secret_grants",
    "destroy_org_secrets",
    "mark_org_secrets_deleted",
    "mark_org_empty",
)


class OrgRow(msgspec.Struct, frozen=True):
    """An organization."""

    id: UUID
    name: str
    created_at: datetime
    updated_at: datetime


class MemberRow(msgspec.Struct, frozen=True):
    """A user's membership."""

    org_id: UUID
    user_id: UUID
    role: str
    created_at: datetime


async def add_org(connection: Connection, org_id: UUID, name: str) -> OrgRow | None:
    """Insert an organization; None when the id is taken."""
    row = await connection.fetchrow(_SQL["add_org"], org_id, name)
    return None if row is None else OrgRow(*row)


async def find_org(connection: Connection, org_id: UUID) -> tuple[OrgRow, bool] | None:
    """Return an organization and whether it is deleted."""
    row = await connection.fetchrow(_SQL["find_org"], org_id)
    return None if row is None else (OrgRow(*row[:4]), row[4])


async def list_orgs(
    connection: Connection, ids: Sequence[UUID], after: tuple[datetime, UUID] | None, limit: int
) -> list[OrgRow]:
    """Return those of `ids` that are not deleted, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    return [OrgRow(*row) for row in await connection.fetch(_SQL["list_orgs"], list(ids), time, last_id, limit)]


async def recent_agents(
    connection: Connection, org_id: UUID, project_ids: Sequence[UUID], limit: int
) -> list[AgentRow]:
    """Return the active agents of these projects that changed last."""
    return [AgentRow(*row) for row in await connection.fetch(_SQL["recent_agents"], org_id, list(project_ids), limit)]


async def lock_org(connection: Connection, org_id: UUID) -> bool:
    """Keep parallel creations and deletions inside an organization out until the transaction ends."""
    return await connection.fetchval(_SQL["lock_org"], org_id) is not None


async def lock_user(connection: Connection, user_id: UUID) -> bool:
    """Keep parallel creations of organizations by one user out until the transaction ends."""
    return await connection.fetchval(_SQL["lock_user"], user_id) is not None


async def count_user_orgs(connection: Connection, user_id: UUID) -> int:
    """Return in how many organizations a user is."""
    count: int = await connection.fetchval(_SQL["count_user_orgs"], user_id)
    return count


async def count_projects(connection: Connection, org_id: UUID) -> int:
    """Return how many projects an organization has."""
    count: int = await connection.fetchval(_SQL["count_projects"], org_id)
    return count


async def add_member(connection: Connection, org_id: UUID, user_id: UUID, role: str) -> MemberRow:
    """Insert a membership."""
    row = await connection.fetchrow(_SQL["add_member"], org_id, user_id, role)
    assert row is not None, "an insert returns its row"
    return MemberRow(*row)


async def member(connection: Connection, org_id: UUID, user_id: UUID) -> MemberRow | None:
    """Return a membership."""
    row = await connection.fetchrow(_SQL["member"], org_id, user_id)
    return None if row is None else MemberRow(*row)


async def add_project(connection: Connection, project_id: UUID, org_id: UUID, name: str, key: str | None) -> ProjectRow:
    """Insert a project. The organization is locked, and neither name nor key is taken."""
    row = await connection.fetchrow(_SQL["add_project"], project_id, org_id, name, key)
    assert row is not None, "an insert returns its row"
    return ProjectRow(*row)


async def project_by_key(connection: Connection, org_id: UUID, key: str) -> tuple[ProjectRow, bool] | None:
    """Return the project that an Idempotency-Key made, and whether it is deleted."""
    row = await connection.fetchrow(_SQL["project_by_key"], org_id, key)
    return None if row is None else (ProjectRow(*row[:5]), row[5])


async def project_by_name(connection: Connection, org_id: UUID, name: str) -> ProjectRow | None:
    """Return an active project by name."""
    row = await connection.fetchrow(_SQL["project_by_name"], org_id, name)
    return None if row is None else ProjectRow(*row)


async def project_of_org(connection: Connection, org_id: UUID, project_id: UUID) -> ProjectRow | None:
    """Return an active project, if it is the organization's."""
    row = await connection.fetchrow(_SQL["project_of_org"], org_id, project_id)
    return None if row is None else ProjectRow(*row)


async def oldest_project(connection: Connection, org_id: UUID) -> ProjectRow | None:
    """Return the project that was made with an organization, deleted or not."""
    row = await connection.fetchrow(_SQL["oldest_project"], org_id)
    return None if row is None else ProjectRow(*row)


async def put_project_role(
    connection: Connection, project_id: UUID, holder_id: UUID, role: str, *, user: bool
) -> datetime:
    """Give a user, or an organization key, a role in a project; return since when it has one."""
    query = _SQL["add_project_user" if user else "add_project_key"]
    since: datetime = await connection.fetchval(query, project_id, holder_id, role)
    return since


async def environment_models(connection: Connection, org_id: UUID) -> list[UUID]:
    """Return the models of an organization that the environment keeps."""
    return [row[0] for row in await connection.fetch(_SQL["environment_models"], org_id)]


async def grant_environment_models(
    connection: Connection, org_id: UUID, project_id: UUID, grants: Sequence[tuple[UUID, UUID]]
) -> None:
    """Let a new project use models of the environment; `grants` are pairs of a new grant's id and a model's."""
    new_ids, model_ids = [new for new, _ in grants], [model for _, model in grants]
    await connection.execute(_SQL["grant_environment_models"], org_id, project_id, new_ids, model_ids)


async def lock_project(connection: Connection, org_id: UUID, project_id: UUID) -> bool:
    """Keep launches in a project out until the transaction ends; False when there is no such active project."""
    return await connection.fetchval(_SQL["lock_project"], org_id, project_id) is not None


async def active_agents(
    connection: Connection, project_id: UUID, limit: int, after: tuple[datetime, UUID] | None = None
) -> list[tuple[datetime, UUID]]:
    """Return (time, id) of up to `limit` agents of a project that are not archived, newest first, after such a pair."""
    time, last_id = after or (None, None)
    rows = await connection.fetch(_SQL["active_agents"], project_id, limit, time, last_id)
    return [(row["created_at"], row["id"]) for row in rows]


async def emptying_projects(connection: Connection, org_id: UUID | None = None) -> list[tuple[UUID, UUID]]:
    """Return (project, organization) of up to 100 deleted projects that are being emptied, oldest first; of one
    organization or of all.
    """
    return [(row["id"], row["org_id"]) for row in await connection.fetch(_SQL["emptying_projects"], org_id)]


async def lock_emptying_project(connection: Connection, project_id: UUID) -> bool:
    """Lock a deleted project until the transaction ends; False when there is nothing left of it."""
    return await connection.fetchval(_SQL["lock_emptying_project"], project_id) is not None


async def active_projects(connection: Connection, org_id: UUID) -> list[UUID]:
    """Return the projects of an organization."""
    return [row[0] for row in await connection.fetch(_SQL["active_projects"], org_id)]


async def hide_project(connection: Connection, project_id: UUID) -> None:
    """Delete a locked project for everybody; its agents and what they use are still there."""
    for statement in _PROJECT_HIDING:
        await connection.execute(_SQL[statement], project_id)


async def tear_down_project(connection: Connection, project_id: UUID) -> None:
    """Remove what a locked, hidden project without active agents still has; its secrets' values are destroyed.

    The first project of a deleted organization stays marked until that is torn down.
    """
    for statement in _PROJECT_TEARDOWN:
        await connection.execute(_SQL[statement], project_id)


async def hide_org(connection: Connection, org_id: UUID) -> None:
    """Delete a locked organization without projects for everybody; what is its own is still there."""
    for statement in _ORG_HIDING:
        await connection.execute(_SQL[statement], org_id)


async def org_leftovers(connection: Connection, org_id: UUID) -> list[UUID] | None:
    """Return the projects of a deleted organization that are still marked; None when it is not deleted.

    The last one stands for what the organization itself has: no project, nothing left.
    """
    row = await connection.fetchrow(_SQL["org_leftovers"], org_id)
    return list(row["projects"]) if row is not None and row["deleted"] else None


async def lock_deleted_org(connection: Connection, org_id: UUID) -> bool:
    """Lock a deleted organization until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["lock_deleted_org"], org_id) is not None


async def tear_down_org(connection: Connection, org_id: UUID) -> None:
    """Remove what a locked, hidden organization still has of its own; its secrets' values are destroyed.

    It stays marked while a provider is still asked for its machines, with the secret that this takes.
    """
    for statement in _ORG_TEARDOWN:
        await connection.execute(_SQL[statement], org_id)
