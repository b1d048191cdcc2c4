"""The flat routes: launch, list, look, pause, resume, delete, in the key's default project.

They are another door to the same agents: `links` lead to the scoped API for everything else.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.access.roles import ProjectScope
from omnara.api.body import check_depth
from omnara.api.cursors import Binding, Position
from omnara.api.flat.types import (
    FlatAgent,
    FlatAgentSummary,
    FlatLaunchResponse,
    FlatStep,
    FlatTool,
    LaunchFlatRequest,
    Links,
    ListFlatAgentsResponse,
    ResumeRequest,
    Status,
)
from omnara.api.omnara.decode import PageQuery, given
from omnara.api.omnara.encode import raw, some
from omnara.api.routing import Call, Route, reply
from omnara.db.agents import AgentRow
from omnara.db.reads import OverviewRow, StatusRow
from omnara.engine import launch_flat, lifecycle, reads, resume
from omnara.engine.scope import AgentPath, default_project
from omnara.engine.status import AgentStatus, agent_status
from omnara.errors import InvalidRequest
from omnara.ids import IdKind, encode

_AGENT: Final = {"id": IdKind.AGENT}


class FlatAgentsQuery(PageQuery, frozen=True, kw_only=True):
    """Which agents to list: those in `status`, or all that are not archived."""

    status: Status | UnsetType = UNSET


def links(agent_id: UUID, project: ProjectScope) -> Links:
    """Where the agent is found in the scoped API, as paths on this server."""
    org, within = encode(IdKind.ORG, project.org_id), encode(IdKind.PROJECT, project.project_id)
    base = f"/api/v1/orgs/{org}/projects/{within}/agents/{encode(IdKind.AGENT, agent_id)}"
    return Links(
        inputs=f"{base}/inputs",
        events=f"{base}/events",
        stream=f"{base}/events/stream",
        tool_calls=f"{base}/tool-calls",
        interactions=f"{base}/interactions",
    )


def _links_of(agent: AgentRow) -> Links:
    return links(agent.id, ProjectScope(agent.org_id, agent.project_id))


async def launch(call: Call) -> web.StreamResponse:
    """Launch an agent and answer at once; a used Idempotency-Key returns the agent that it launched."""
    body: LaunchFlatRequest = call.body
    launched = await launch_flat.launch_flat(
        call.context.deps,
        call.principal,
        default_project(call.principal),
        launch_flat.FlatLaunch(
            model=body.model,
            system_prompt=body.system_prompt,
            tools=[_tool(tool) for tool in given(body.tools) or []],
            machine_sources=_sources(given(body.machine_sources) or []),
            temperature=given(body.temperature),
            message=given(body.message),
            name=given(body.name),
            key=call.key,
        ),
    )
    agent = launched.agent
    answer = FlatLaunchResponse(
        id=encode(IdKind.AGENT, agent.id), name=agent.name, links=_links_of(agent), created_at=agent.created_at
    )
    return reply(201 if launched.created else 200, answer)


def _sources(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    check_depth(sources)
    return sources


def _tool(tool: str | FlatTool) -> str | launch_flat.FlatTool:
    if isinstance(tool, str):
        return tool
    check_depth(tool.input_schema)
    mode = tool.permission if tool.permission.startswith("always_") else f"always_{tool.permission}"
    return launch_flat.FlatTool(tool.name, tool.description, tool.input_schema, mode)


async def list_agents(call: Call) -> web.StreamResponse:
    """A page of the agents of the caller's default project with their status, newest first."""
    query: FlatAgentsQuery = call.query
    project = default_project(call.principal)
    status, cursor = given(query.status), given(query.cursor)
    binding = Binding("flat-agents", (str(project.project_id), status))
    position = None if cursor is None else binding.decode(cursor)
    page = await reads.list_overview(
        call.context.deps,
        call.principal,
        project,
        status=status,
        after=None if position is None else (position.time, position.id),
        limit=query.limit,
    )
    last = page.rows[-1] if page.more else None
    return reply(
        200,
        ListFlatAgentsResponse(
            data=[_summary(row, project) for row in page.rows],
            next_cursor=None if last is None else binding.encode(Position.at(last.created_at, last.agent_id)),
        ),
    )


def _summary(row: OverviewRow, project: ProjectScope) -> FlatAgentSummary:
    word: Any = row.status
    return FlatAgentSummary(
        id=encode(IdKind.AGENT, row.agent_id),
        name=row.name,
        status=word,
        model=row.model,
        steps=row.last_step,
        turns=row.turns,
        open_calls=row.open_calls,
        links=links(row.agent_id, project),
        created_at=row.created_at,
        updated_at=row.updated_at,
        archived_at=some(row.archived_at),
    )


async def get(call: Call) -> web.StreamResponse:
    """How an agent is doing."""
    return await _status(call)


async def pause(call: Call) -> web.StreamResponse:
    """Let the running step be saved, then run nothing more. Answers at once."""
    await lifecycle.pause(call.context.deps, call.principal, _path(call))
    return await _status(call)


async def go_on(call: Call) -> web.StreamResponse:
    """Go on from the last saved step; a crashed agent only at the caller's word."""
    body: ResumeRequest = call.body if call.body is not None else ResumeRequest()
    if body.force and body.restart:
        raise InvalidRequest("choose force or restart")
    await resume.resume(call.context.deps, call.principal, _path(call), force=body.force, restart=body.restart)
    return await _status(call)


async def delete(call: Call) -> web.StreamResponse:
    """Stop the agent, free what it holds and archive it; its log stays readable. Twice is as good as once."""
    await lifecycle.delete(call.context.deps, call.principal, _path(call))
    return await _status(call)


def _path(call: Call) -> AgentPath:
    return AgentPath(call.ids["id"])


async def _status(call: Call) -> web.StreamResponse:
    return reply(200, flat_agent(await agent_status(call.context.deps, call.principal, _path(call))))


def flat_agent(found: AgentStatus) -> FlatAgent:
    """The flat view of an agent."""
    agent, row = found.agent, found.row
    word: Any = row.status
    action: Any = found.next_action
    return FlatAgent(
        id=encode(IdKind.AGENT, agent.id),
        name=agent.name,
        status=word,
        model=row.model,
        system_prompt=row.system_prompt,
        temperature=some(row.temperature),
        last_step=_last_step(row),
        next_action=action,
        output=found.output,
        usage=found.usage,
        diagnosis=some(found.diagnosis),
        links=_links_of(agent),
        created_at=agent.created_at,
        updated_at=agent.updated_at,
        archived_at=some(agent.archived_at),
    )


def _last_step(row: StatusRow) -> FlatStep | None:
    if row.step_kind is None or row.step_started_at is None:
        return None
    kind: Any = row.step_kind
    state: Any = row.step_state
    error: msgspec.Raw | UnsetType = UNSET if row.step_error is None else raw(row.step_error)
    return FlatStep(
        number=row.last_step,
        kind=kind,
        status=state,
        attempt=row.step_attempt or 1,
        started_at=row.step_started_at,
        finished_at=some(row.step_finished_at),
        retry_at=some(row.step_retry_at),
        error=error,
    )


ROUTES: Final = (
    Route(
        method="POST",
        path="/agents",
        operation_id="launchFlatAgent",
        handler=launch,
        body=LaunchFlatRequest,
        idempotent=True,
        responses={200: FlatLaunchResponse, 201: FlatLaunchResponse},
    ),
    Route(
        method="GET",
        path="/agents",
        operation_id="listFlatAgents",
        handler=list_agents,
        query=FlatAgentsQuery,
        responses={200: ListFlatAgentsResponse},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
    Route(
        method="GET",
        path="/agents/{id}",
        operation_id="getFlatAgent",
        handler=get,
        path_ids=_AGENT,
        responses={200: FlatAgent},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
    Route(
        method="POST",
        path="/agents/{id}/pause",
        operation_id="pauseFlatAgent",
        handler=pause,
        path_ids=_AGENT,
        responses={200: FlatAgent},
    ),
    Route(
        method="POST",
        path="/agents/{id}/resume",
        operation_id="resumeFlatAgent",
        handler=go_on,
        path_ids=_AGENT,
        body=ResumeRequest,
        body_required=False,
        responses={200: FlatAgent},
    ),
    Route(
        method="DELETE",
        path="/agents/{id}",
        operation_id="deleteFlatAgent",
        handler=delete,
        path_ids=_AGENT,
        responses={200: FlatAgent},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
)
