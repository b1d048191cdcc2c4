"""Emptying deleted projects: archiving their agents, then removing what only they used.

A project may have thousands of agents, and each is archived in a transaction of its own, as a person would do it; so
no request waits for it. Everything it goes by is in the database: whoever comes next goes on where somebody was killed,
and several may at a time. Source: api.md §8 (deletion); DESIGN §4 (archiving is final).
"""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.access.roles import ProjectScope
from omnara.db import orgs
from omnara.db.connection import Connection
from omnara.engine.deps import Deps
from omnara.engine.lifecycle import archive_for_good
from omnara.engine.machines.closing_down import release_project
from omnara.errors import Unavailable
from omnara.log import get_logger

__all__ = ["empty_projects"]

log = get_logger(__name__)

BATCH: Final = 100


async def empty_projects(deps: Deps, org_id: UUID | None = None) -> bool:
    """Empty the deleted projects of an organization, or of all; return whether none is left.

    Holds one connection at a time, and only for the length of a statement or of one agent's transaction. Raises
    DatabaseUnavailable. Cancellation leaves the rest to a later call.
    """
    async with deps.db.acquire() as connection:
        found = await orgs.emptying_projects(connection, org_id)
    return all([await _empty(deps, ProjectScope(of_org, project_id)) for project_id, of_org in found])


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
