"""Emptying deleted projects and organizations: archiving their agents, then removing what only they used.

A project may have thousands of agents, and each is archived in a transaction of its own, as a person would do it; so
no request waits for it. Everything it goes by is in the database: whoever comes next goes on where somebody was killed,
and several may at a time. An organization is emptied when its projects are; until then, and until its own machines and
secrets are gone, its first project stays marked. Source: api.md §8 (deletion); DESIGN §4 (archiving is final).
"""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from omnara import probes
from omnara.access.roles import ProjectScope
from omnara.db import orgs
from omnara.db.connection import Connection
from omnara.engine.deps import Deps
from omnara.engine.lifecycle import archive_for_good
from omnara.engine.machines.closing_down import release_org, release_project
from omnara.errors import Unavailable
from omnara.log import get_logger

__all__ = ["empty_projects"]

log = get_logger(__name__)

BATCH: Final = 100


async def empty_projects(deps: Deps, org_id: UUID | None = None) -> bool:
    """Empty the deleted projects of an organization, or of all, and deleted organizations; return whether none is left.

    Holds one connection at a time, and only for the length of a statement or of one transaction. Raises
    DatabaseUnavailable. Cancellation leaves the rest to a later call.
    """
    async with deps.db.acquire() as connection:
        found = await orgs.emptying_projects(connection, org_id)
    done = [await _guarded(_empty(deps, ProjectScope(of_org, project_id)), project_id) for project_id, of_org in found]
    done += [await _guarded(_empty_org(deps, of_org), of_org) for of_org in {of_org for _, of_org in found}]
    return all(done)


async def _guarded(emptying: Coroutine[Any, Any, bool], what: UUID) -> bool:
    """One project or organization whose data is at fault must not keep the others."""
    try:
        return await emptying
    except Unavailable:
        raise
    except Exception:
        log.exception("not_emptied", id=str(what))
        return False


async def _empty(deps: Deps, project: ProjectScope) -> bool:
    """Archive a project's agents and take its machines and all that is its own; False when an agent is left."""
    after: tuple[datetime, UUID] | None = None
    while True:
        async with deps.db.acquire() as connection:
            agents = await orgs.active_agents(connection, project.project_id, BATCH, after)
        if not agents:
            break
        after = agents[-1]
        for _, agent_id in agents:
            await _archive(deps, agent_id)
            probes.hit("project_agent_archived")
    await release_project(deps, project)
    return await deps.db.run(lambda connection: _finish(connection, project.project_id))


async def _archive(deps: Deps, agent_id: UUID) -> None:
    """One agent that cannot be archived, because of a damaged row for instance, must not keep the others."""
    try:
        await archive_for_good(deps, agent_id)
    except Unavailable:
        raise
    except Exception:
        log.exception("agent_not_archived", agent_id=str(agent_id))


async def _finish(connection: Connection, project_id: UUID) -> bool:
    if not await orgs.lock_emptying_project(connection, project_id):
        return True  # somebody else was faster
    if await orgs.active_agents(connection, project_id, 1):
        return False
    await orgs.tear_down_project(connection, project_id)
    return True


async def _empty_org(deps: Deps, org_id: UUID) -> bool:
    """End the machines of a deleted organization whose projects are empty, and destroy its secrets."""
    async with deps.db.acquire() as connection:
        left = await orgs.org_leftovers(connection, org_id)
    if not left:  # it is not deleted, or somebody else was faster
        return True
    if len(left) > 1:
        return False
    await release_org(deps, org_id)
    probes.hit("org_released")
    return await deps.db.run(lambda connection: _finish_org(connection, org_id, left))


async def _finish_org(connection: Connection, org_id: UUID, left: list[UUID]) -> bool:
    if not await orgs.lock_deleted_org(connection, org_id):
        return True
    now = await orgs.org_leftovers(connection, org_id)
    if now != left or await orgs.active_agents(connection, left[0], 1):
        return not now
    await orgs.tear_down_org(connection, org_id)
    return not await orgs.org_leftovers(connection, org_id)
