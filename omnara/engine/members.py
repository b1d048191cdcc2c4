"""Members of an organization and the roles in its projects, of people and of keys.

An organization always keeps an owner, and only owners make or unmake owners. Source: api.md §3, §7; contract.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar
from uuid import UUID

from omnara.access.principals import OrgRole, Principal, PrincipalKind, ProjectRole
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope
from omnara.db import accounts, credentials, members, orgs
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.members import OrgMemberRow, ProjectRoleRow
from omnara.db.orgs import MemberRow
from omnara.engine.deps import Deps
from omnara.engine.scope import org_in_scope, project_in_scope
from omnara.errors import Conflict, Forbidden, InvalidRequest, NotFound

R = TypeVar("R", bound=StrEnum)


async def list_members(deps: Deps, p: Principal, org_id: UUID, order: ListOrder) -> list[tuple[str, OrgMemberRow]]:
    """Return members with sort values; one more than the page when there are more."""
    org_in_scope(p, org_id, OrgAction.READ)
    async with deps.db.acquire() as connection:
        return await members.list_members(connection, org_id, order)


async def set_role(deps: Deps, p: Principal, org_id: UUID, user_id: UUID, role: str) -> MemberRow:
    """Change a member's role. Own transaction.

    Raises NotFound, Forbidden (owners are made and unmade by owners), InvalidRequest, Conflict for the last owner.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    wanted = _role(OrgRole, role)

    async def work(connection: Connection) -> MemberRow:
        owners = await members.lock_owners(connection, org_id)
        before = await _member(connection, org_id, user_id)
        if OrgRole.OWNER in (before.role, wanted):
            org_in_scope(p, org_id, OrgAction.OWN)
        if wanted is not OrgRole.OWNER:
            _keep_an_owner(owners, user_id)
        return await members.set_role(connection, org_id, user_id, wanted.value)

    return await deps.db.run(work)


async def remove_member(deps: Deps, p: Principal, org_id: UUID, user_id: UUID) -> None:
    """End a membership with all its roles; everybody may end their own. Own transaction.

    Raises NotFound, Forbidden, Conflict for the last owner.
    """
    itself = p.kind is PrincipalKind.USER and p.id == user_id
    org_in_scope(p, org_id, OrgAction.READ if itself else OrgAction.MANAGE)

    async def work(connection: Connection) -> None:
        owners = await members.lock_owners(connection, org_id)
        before = await _member(connection, org_id, user_id)
        if before.role == OrgRole.OWNER and not itself:
            org_in_scope(p, org_id, OrgAction.OWN)
        _keep_an_owner(owners, user_id)
        await members.remove(connection, org_id, user_id)

    await deps.db.run(work)


async def delete_user(deps: Deps, p: Principal) -> None:
    """End the calling user: every membership, token and secret of their own. Own transaction.

    Raises Forbidden for keys, Conflict while an organization has no other owner. The owner of the first organization
    is whom commands make keys for, so ownership of it has to pass to somebody else first.
    """
    if p.kind is not PrincipalKind.USER:
        raise Forbidden("organization keys are not users")

    async def work(connection: Connection) -> None:
        if not await orgs.lock_user(connection, p.id):
            raise NotFound
        first = await accounts.first_org(connection)
        if first is not None and first.user_id == p.id:
            raise Conflict("the first organization of this installation needs another owner")
        for org in sorted(await accounts.user_orgs(connection, p.id), key=lambda org: org.id):
            _keep_an_owner(await members.lock_owners(connection, org.id), p.id)
            await members.remove(connection, org.id, p.id)
        await members.erase_user(connection, p.id)

    await deps.db.run(work)


async def list_project_roles(
    deps: Deps, p: Principal, org_id: UUID, holder_id: UUID, *, user: bool
) -> list[ProjectRoleRow]:
    """Return the roles of a member, or of a key, in an organization's projects. Raises NotFound, Forbidden."""
    itself = user and p.kind is PrincipalKind.USER and p.id == holder_id
    org_in_scope(p, org_id, OrgAction.READ if itself else OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        await _holder(connection, org_id, holder_id, user=user)
        return await members.project_roles(connection, org_id, holder_id, user=user)


async def set_project_role(
    deps: Deps, p: Principal, project: ProjectScope, holder_id: UUID, role: str, *, user: bool
) -> ProjectRoleRow:
    """Give a member or a key a role in a project, in place of any other. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a revoked key.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)
    wanted = _role(ProjectRole, role)

    async def work(connection: Connection) -> ProjectRoleRow:
        await _holder(connection, project.org_id, holder_id, user=user, active=True)
        found = await orgs.project_of_org(connection, project.org_id, project.project_id)
        if found is None:
            raise NotFound("project")
        since = await orgs.put_project_role(connection, found.id, holder_id, wanted.value, user=user)
        return ProjectRoleRow(found.id, found.name, wanted.value, since)

    return await deps.db.run(work)


async def remove_project_role(deps: Deps, p: Principal, project: ProjectScope, holder_id: UUID, *, user: bool) -> None:
    """Take a role in a project from a member or a key. Own transaction. Raises NotFound, also for none; Forbidden."""
    project_in_scope(p, project, ProjectAction.ACCESS)

    async def work(connection: Connection) -> None:
        await _holder(connection, project.org_id, holder_id, user=user)
        if not await members.drop_project_role(connection, project.project_id, holder_id, user=user):
            raise NotFound("role")

    await deps.db.run(work)


def _keep_an_owner(owners: list[UUID], leaving: UUID) -> None:
    if owners == [leaving]:
        raise Conflict("an organization keeps at least one owner")


def _role(kind: type[R], text: str) -> R:
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequest(f"role must be one of {', '.join(kind)}") from None


async def _member(connection: Connection, org_id: UUID, user_id: UUID) -> MemberRow:
    row = await orgs.member(connection, org_id, user_id)
    if row is None:
        raise NotFound("member")
    return row


async def _holder(connection: Connection, org_id: UUID, holder_id: UUID, *, user: bool, active: bool = False) -> None:
    if user:
        await _member(connection, org_id, holder_id)
        return
    revoked = await credentials.lock_key(connection, org_id, holder_id)
    if revoked is None:
        raise NotFound("API key")
    if revoked and active:
        raise Conflict("the key is revoked")
