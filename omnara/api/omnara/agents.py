"""Routes of agents: launch, list, get, archive."""

from __future__ import annotations

from typing import Annotated, Any, Final

from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from omnara.api.cursors import Binding, Position
from omnara.api.omnara import encode
from omnara.api.omnara.configs import agent_config
from omnara.api.omnara.decode import (
    AGENT,
    AGENT_PATH,
    PROJECT,
    PROJECT_PATH,
    PageQuery,
    agent_path,
    given,
    id_in_body,
    project_scope,
)
from omnara.api.omnara.types.agents import (
    CreateAgentRequest,
    CurrentAgentResponse,
    GetAgentResponse,
    LaunchAgentResponse,
    ListAgentsResponse,
)
from omnara.api.omnara.types.scalars import AgentProfileID, ResourceListSort
from omnara.api.routing import Call, Route, reply
from omnara.engine import launch, lifecycle, reads
from omnara.errors import NotFound
from omnara.ids import IdKind
from omnara.ids import encode as public_id


class AgentsQuery(PageQuery, frozen=True, kw_only=True):
    """Which agents to list, and in which order."""

    name: Annotated[str, Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    agent_profile_id: AgentProfileID | UnsetType = UNSET
    sort: ResourceListSort = "-created_at"


async def launch_agent(call: Call) -> web.StreamResponse:
    """Launch an agent; a used Idempotency-Key returns the agent that it launched, as it is now."""
    body: CreateAgentRequest = call.body
    profile = given(body.profile)
    if profile is not None:
        # Profiles are not part of this release, so every well-formed id is an unknown one.
        id_in_body(IdKind.AGENT_PROFILE, profile)
        raise NotFound("agent profile")
    launched = await launch.launch_agent(
        call.context.deps,
        call.principal,
        project_scope(call),
        id_in_body(IdKind.AGENT_CONFIG, body.config),
        name=given(body.name),
        message=given(body.message),
        key=call.key,
    )
    agent = encode.agent(launched.agent)
    if not launched.created or launched.config is None:
        return reply(200, CurrentAgentResponse(agent=agent))
    return reply(
        201,
        LaunchAgentResponse(
            agent=agent,
            agent_config=agent_config(launched.config),
            machine_bindings=[encode.machine_binding(row) for row in launched.bindings],
            agent_input=UNSET if launched.input is None else encode.agent_input(launched.input),
        ),
    )


async def list_agents(call: Call) -> web.StreamResponse:
    """A page of active agents. Source: api.md §7 (resource lists)."""
    query: AgentsQuery = call.query
    profile, name = given(query.agent_profile_id), given(query.name)
    project = project_scope(call)
    binding = Binding("agents", (str(project.project_id), name, profile, query.sort))
    cursor = given(query.cursor)
    position = None if cursor is None else binding.decode(cursor)
    field = query.sort.removeprefix("-")
    page = await reads.list_agents(
        call.context.deps,
        call.principal,
        project,
        sort=query.sort,
        name=name,
        after=None if position is None else (position.key if field == "name" else position.time, position.id),
        limit=query.limit,
    )
    # No agent of this release was launched from a profile.
    rows = page.rows if profile is None else []
    last = _position(field, rows[-1]) if rows and page.more else None
    next_cursor = None if last is None else binding.encode(last)
    return reply(200, ListAgentsResponse(data=[encode.agent(row) for row in rows], next_cursor=next_cursor))


def _position(field: str, row: Any) -> Position:
    if field == "name":
        return Position(row.name, row.id)
    return Position.at(row.created_at if field == "created_at" else row.updated_at, row.id)


async def get_agent(call: Call) -> web.StreamResponse:
    """One agent, archived or not, with its machines. MCP servers are not part of this release: there are none."""
    agent, machines = await reads.get_agent_machines(call.context.deps, call.principal, agent_path(call))
    ids = [public_id(IdKind.MACHINE, machine) for machine in machines]
    return reply(200, GetAgentResponse(agent=encode.agent(agent), machine_ids=ids, mcp_connections=[]))


async def archive_agent(call: Call) -> web.StreamResponse:
    """Stop an agent for good; its log stays readable."""
    agent = await lifecycle.archive(call.context.deps, call.principal, agent_path(call))
    return reply(200, CurrentAgentResponse(agent=encode.agent(agent)))


ROUTES: Final = (
    Route(
        method="POST",
        path=f"{PROJECT_PATH}/agents",
        operation_id="createAgent",
        handler=launch_agent,
        path_ids=PROJECT,
        body=CreateAgentRequest,
        idempotent=True,
        responses={200: CurrentAgentResponse, 201: LaunchAgentResponse},
    ),
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/agents",
        operation_id="listAgents",
        handler=list_agents,
        path_ids=PROJECT,
        query=AgentsQuery,
        responses={200: ListAgentsResponse},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
    Route(
        method="GET",
        path=AGENT_PATH,
        operation_id="getAgent",
        handler=get_agent,
        path_ids=AGENT,
        responses={200: GetAgentResponse},
    ),
    Route(
        method="POST",
        path=f"{AGENT_PATH}/archive",
        operation_id="archiveAgent",
        handler=archive_agent,
        path_ids=AGENT,
        responses={200: CurrentAgentResponse},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
)
