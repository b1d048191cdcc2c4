"""Organizations: made by a user who becomes the owner, listed, and deleted with everything in them.

An Idempotency-Key decides the new organization's id, so that a repeated request finds what the first one made without
a table of keys. Source: api.md §3, §8; contract (createOrganization, deleteOrganization).
"""

from __future__ import annotations

import hashlib
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction
from omnara.db import accounts, orgs
from omnara.db.accounts import ProjectRow
from omnara.db.agents import AgentRow
from omnara.db.connection import Connection
from omnara.db.orgs import MemberRow, OrgRow
from omnara.engine.bootstrap import PROJECT_NAME
from omnara.engine.deps import Deps
from omnara.engine.naming import checked_name
from omnara.engine.projects import hide_project
from omnara.engine.reads import Page, TimeKey
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, Forbidden, IdempotencyKeyConflict, InvalidRequest, NotFound
from omnara.ids import new_uuid

MAX_ORGS: Final = 1000
"""Per user. Source: api.md §8 (resource caps)."""

OVERVIEW_PROJECTS: Final = 200
OVERVIEW_AGENTS: Final = 5
"""Source: api.md §7 (overview)."""


class CreatedOrg(msgspec.Struct, frozen=True):
    """An organization with its first project and the caller's membership. Not `created`: it was there already."""

    created: bool
    org: OrgRow
    project: ProjectRow
    membership: MemberRow


class ListedOrg(msgspec.Struct, frozen=True):
    """An organization with the caller's role in it."""

    row: OrgRow
    role: str


class Overview(msgspec.Struct, frozen=True):
    """What a person sees first of an organization."""

    projects: list[ProjectRow]
    agents: list[AgentRow]


async def create_org(deps: Deps, p: Principal, name: str, key: str | None) -> CreatedOrg:
    """Make an organization with a project `Default`; the caller owns both. Own transaction.

    Raises Forbidden for keys of organizations, InvalidRequest, IdempotencyKeyConflict, Conflict at the cap.
    """
    if p.kind is not PrincipalKind.USER:
        raise Forbidden("organization keys make no organizations")
    shown = checked_name(name)
    org_id = new_uuid() if key is None else _id_of_key(p.id, key)

    async def work(connection: Connection) -> CreatedOrg:
        if not await orgs.lock_user(connection, p.id):
            raise Forbidden
        found = await orgs.find_org(connection, org_id)
        if found is not None:
            return await _replayed(connection, p, found, shown)
        if await orgs.count_user_orgs(connection, p.id) >= MAX_ORGS:
            raise Conflict(f"a user may be in {MAX_ORGS} organizations")
        org = await orgs.add_org(connection, org_id, shown)
        assert org is not None, "the user is locked and only it makes this id"
        membership = await orgs.add_member(connection, org_id, p.id, "owner")
        project = await orgs.add_project(connection, new_uuid(), org_id, PROJECT_NAME, None)
        await orgs.put_project_role(connection, project.id, p.id, "admin", user=True)
        return CreatedOrg(True, org, project, membership)

    return await deps.db.run(work)


async def list_orgs(deps: Deps, p: Principal, *, after: TimeKey | None, limit: int) -> Page[ListedOrg]:
    """Return the caller's organizations, newest first."""
    async with deps.db.acquire() as connection:
        rows = await orgs.list_orgs(connection, list(p.org_roles), after, limit + 1)
    listed = [ListedOrg(row, p.org_roles[row.id].value) for row in rows[:limit]]
    return Page(listed, len(rows) > limit)


async def overview(deps: Deps, p: Principal, org_id: UUID) -> Overview:
    """Return the newest projects that the caller sees, and what changed last in them. Raises NotFound.

    One connection; two statements, which need not agree to the millisecond.
    """
    org_in_scope(p, org_id, OrgAction.READ)
    visible = [project_id for project_id, grant in p.project_grants.items() if grant.org_id == org_id]
    async with deps.db.acquire() as connection:
        projects = await accounts.list_projects(connection, org_id, visible, None, OVERVIEW_PROJECTS)
        agents = await orgs.recent_agents(connection, org_id, visible, OVERVIEW_AGENTS)
    return Overview(projects, agents)


async def delete_org(deps: Deps, p: Principal, org_id: UUID) -> None:
    """Delete an organization and its projects for everybody, at once, whatever it has. Several short transactions.

    From the last commit on nobody gets in. Agents are archived, and machines and secrets ended, afterwards
    (`engine.emptying`). A request that ends early can be sent again. Raises NotFound, Forbidden unless the caller owns
    it.
    """
    org_in_scope(p, org_id, OrgAction.OWN)
    hidden = False
    while not hidden:
        async with deps.db.acquire() as connection:
            projects = await orgs.active_projects(connection, org_id)
        for project_id in projects:
            await hide_project(deps, org_id, project_id)
        hidden = await deps.db.run(lambda connection: _hide(connection, org_id))


async def _hide(connection: Connection, org_id: UUID) -> bool:
    """Hide the organization unless a project was made meanwhile."""
    if not await orgs.lock_org(connection, org_id):
        raise NotFound
    if await orgs.active_projects(connection, org_id):
        return False
    await orgs.hide_org(connection, org_id)
    return True


async def _replayed(connection: Connection, p: Principal, found: tuple[OrgRow, bool], name: str) -> CreatedOrg:
    org, deleted = found
    membership = await orgs.member(connection, org.id, p.id)
    project = await orgs.oldest_project(connection, org.id)
    if deleted or org.name != name or membership is None or project is None:
        raise IdempotencyKeyConflict
    return CreatedOrg(False, org, project, membership)


def _id_of_key(user_id: UUID, key: str) -> UUID:
    """Return the id that a user's key stands for: SHA-256, version 8. Source: api.md §8."""
    if not key.strip() or key != key.strip():
        raise InvalidRequest("Idempotency-Key must not be blank or padded here")
    digest = bytearray(hashlib.sha256(b"omnara org v1\0" + user_id.bytes + key.encode()).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x80
    digest[8] = digest[8] & 0x3F | 0x80
    return UUID(bytes=bytes(digest))
