"""Projects: made by managers of an organization; deleted at once, and emptied afterwards.

Source: api.md §3 (the creator becomes the project's admin), §8 (keys and names), contract (deleteProject).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction
from omnara.db import orgs
from omnara.db.accounts import ProjectRow
from omnara.db.connection import Connection
from omnara.engine.deps import Deps
from omnara.engine.naming import checked_name
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, IdempotencyKeyConflict, NotFound
from omnara.ids import new_uuid

MAX_PROJECTS: Final = 1000
"""Per organization. Source: api.md §8 (resource caps)."""


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
    """Delete a project for everybody, at once. Own transaction, whatever the number of its agents.

    From its commit on nobody gets in, and nothing is launched or said in it: a launch under way is either before it or
    refused. Its agents are archived afterwards (`engine.emptying`). Raises NotFound, Forbidden.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    await hide_project(deps, org_id, project_id)


async def hide_project(deps: Deps, org_id: UUID, project_id: UUID) -> None:
    """Do what `delete_project` does, for a caller whose right to it is known. Raises NotFound."""

    async def work(connection: Connection) -> None:
        if not await orgs.lock_project(connection, org_id, project_id):
            raise NotFound("project")
        await orgs.hide_project(connection, project_id)

    await deps.db.run(work)


async def _replayed(connection: Connection, org_id: UUID, name: str, key: str) -> CreatedProject | None:
    found = await orgs.project_by_key(connection, org_id, key)
    if found is None:
        return None
    row, deleted = found
    if deleted or row.name != name:
        raise IdempotencyKeyConflict
    return CreatedProject(False, row)
