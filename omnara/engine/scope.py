"""Finding what a request names, as the caller may see it: the one gate between a path and a use case.

What the caller may not see is not found; what it sees but may not change is forbidden. Source: DESIGN §2, invariant 8.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope, require
from omnara.db import agents
from omnara.db.agents import AgentRef, AgentRow
from omnara.db.connection import Connection
from omnara.errors import Forbidden, NotFound


class AgentPath(msgspec.Struct, frozen=True):
    """An agent as a request names it. Scoped routes give all three ids, flat routes only the agent's."""

    agent_id: UUID
    org_id: UUID | None = None
    project_id: UUID | None = None


async def locate(connection: Connection, p: Principal, path: AgentPath, action: ProjectAction) -> AgentRef:
    """Return where the agent belongs if the caller may do `action` to it. One look-up by key; takes no lock.

    Raises NotFound (also when the path's organization or project is not the agent's, and from the commit on that
    deletes its project, whatever the caller is remembered to be) and Forbidden.
    """
    agent = await agents.locate_open_agent(connection, path.agent_id)
    _check(p, path, agent, action)
    assert agent is not None, "_check raised"
    return agent


async def agent_in_scope(connection: Connection, p: Principal, path: AgentPath, action: ProjectAction) -> AgentRow:
    """Return the agent as it is shown, if the caller may do `action` to it. Raises as `locate` does."""
    agent = await agents.find_agent(connection, path.agent_id)
    _check(p, path, agent, action)
    assert agent is not None, "_check raised"
    return agent


def _check(p: Principal, path: AgentPath, agent: AgentRow | AgentRef | None, action: ProjectAction) -> None:
    if agent is None:
        if path.org_id is not None and path.project_id is not None:
            require(p, ProjectAction.READ, ProjectScope(path.org_id, path.project_id))
        raise NotFound
    if path.org_id not in (None, agent.org_id) or path.project_id not in (None, agent.project_id):
        raise NotFound
    require(p, action, ProjectScope(agent.org_id, agent.project_id))


def project_in_scope(p: Principal, project: ProjectScope, action: ProjectAction) -> None:
    """Check that the caller may do `action` in the project. Raises NotFound and Forbidden."""
    require(p, action, project)


def org_in_scope(p: Principal, org_id: UUID, action: OrgAction) -> None:
    """Check that the caller may do `action` in the organization. Raises NotFound and Forbidden."""
    require(p, action, org_id)


def default_project(p: Principal) -> ProjectScope:
    """Return the project of requests that name none. Raises Forbidden when the caller has no project at all."""
    if p.default_project_id is None:
        raise Forbidden("the key has no project")
    return ProjectScope(p.project_grants[p.default_project_id].org_id, p.default_project_id)
