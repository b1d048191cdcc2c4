"""Projects: made by managers of an organization, deleted with their agents stopped.

Source: api.md §3 (the creator becomes the project's admin), §8 (keys and names), contract (deleteProject).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction, ProjectScope
from omnara.db import orgs
from omnara.db.accounts import ProjectRow
from omnara.db.connection import Connection
from omnara.engine.deps import Deps
from omnara.engine.lifecycle import archive_for_good
from omnara.engine.machines.closing_down import release_project
from omnara.engine.naming import checked_name
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, IdempotencyKeyConflict, NotFound
from omnara.ids import new_uuid

MAX_PROJECTS: Final = 1000
"""Per organization. Source: api.md §8 (resource caps)."""

_BATCH: Final = 100


class CreatedProject(msgspec.Struct, frozen=True):
    """A project; not `created` when the key had made it before."""

    created: bool
    row: ProjectRow


async def create_project(deps: Deps, p: Principal, org_id: UUID, name: str, key: str | None) -> CreatedProject:
    """Make a project whose admin is the caller, with the models that the environment offers. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, IdempotencyKeyConflict (also for a taken name), Conflict at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown = checked_name(name)

    async def work(connection: Connection) -> CreatedProject:
        if not await orgs.lock_org(connection, org_id):
            raise NotFound
        replayed = None if key is None else await _replayed(connection, org_id, shown, key)
        if replayed is not None:
            return replayed
        if await orgs.project_by_name(connection, org_id, shown) is not None:
            raise IdempotencyKeyConflict("a project of this name exists")
        if await orgs.count_projects(connection, org_id) >= MAX_PROJECTS:
            raise Conflict(f"an organization may have {MAX_PROJECTS} projects")
        row = await orgs.add_project(connection, new_uuid(), org_id, shown, key)
        await orgs.put_project_role(connection, row.id, p.id, "admin", user=p.kind is PrincipalKind.USER)
        offered = await orgs.environment_models(connection, org_id)
        await orgs.grant_environment_models(connection, org_id, row.id, [(new_uuid(), model) for model in offered])
        return CreatedProject(True, row)

    return await deps.db.run(work)


async def delete_project(deps: Deps, p: Principal, org_id: UUID, project_id: UUID) -> None:
    """Archive a project's agents and take its machines, then hide it with all that is its own.

    Several transactions; may be repeated. Raises NotFound, Forbidden.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    await delete_project_of(deps, org_id, project_id)


async def delete_project_of(deps: Deps, org_id: UUID, project_id: UUID) -> None:
    """Do what `delete_project` does, for a caller whose right to it is known. Raises NotFound."""
    async with deps.db.acquire() as connection:
        if await orgs.project_of_org(connection, org_id, project_id) is None:
            raise NotFound("project")
    while True:
        async with deps.db.acquire() as connection:
            agents = await orgs.active_agents(connection, project_id, _BATCH)
        for agent_id in agents:
            await archive_for_good(deps, agent_id)
        if not agents:
            await release_project(deps, ProjectScope(org_id, project_id))
        if not agents and await deps.db.run(lambda connection: _finish(connection, org_id, project_id)):
            return


async def _finish(connection: Connection, org_id: UUID, project_id: UUID) -> bool:
    """Hide the project unless an agent was launched meanwhile; the lock keeps further launches waiting."""
    if not await orgs.lock_project(connection, org_id, project_id):
        raise NotFound("project")
    if await orgs.active_agents(connection, project_id, 1):
        return False
    await orgs.tear_down_project(connection, project_id)
    return True


async def _replayed(connection: Connection, org_id: UUID, name: str, key: str) -> CreatedProject | None:
    found = await orgs.project_by_key(connection, org_id, key)
    if found is None:
        return None
    row, deleted = found
    if deleted or row.name != name:
        raise IdempotencyKeyConflict
    return CreatedProject(False, row)
