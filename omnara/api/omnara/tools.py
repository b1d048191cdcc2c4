"""Routes of tool calls and interactions: what waits for somebody outside."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.body import MEDIA_BODY_LIMIT
from omnara.api.cursors import Binding, Position
from omnara.api.omnara import decode, encode
from omnara.api.omnara.decode import AGENT, AGENT_PATH, PageQuery, agent_path, given
from omnara.api.omnara.types.scalars import AgentInteractionState, ToolCallState, ToolCallType
from omnara.api.omnara.types.tools import (
    AgentInteraction,
    ListAgentInteractionsResponse,
    ListToolCallsResponse,
    ResolveAgentInteractionRequest,
    SubmitToolCallResultRequest,
    SubmitToolCallResultResponse,
    ToolResult,
)
from omnara.api.routing import Call, Route, reply
from omnara.engine import interactions, reads, results
from omnara.engine.reads import TimeKey
from omnara.ids import IdKind
from omnara.ids import encode as public_id


class ToolCallsQuery(PageQuery, frozen=True, kw_only=True):
    """Which tool calls to list."""

    state: ToolCallState | UnsetType = UNSET
    type: ToolCallType | UnsetType = UNSET


class InteractionsQuery(PageQuery, frozen=True, kw_only=True):
    """Which interactions to list."""

    state: AgentInteractionState | UnsetType = UNSET


def time_key(binding: Binding, query: PageQuery) -> TimeKey | None:
    """Where a page of a list ordered by creation begins; None at the start. Raises InvalidRequest."""
    cursor = given(query.cursor)
    if cursor is None:
        return None
    position = binding.decode(cursor)
    return position.time, position.id


def next_cursor(binding: Binding, rows: list[Any], *, more: bool) -> str | None:
    """The cursor after the last of `rows`, which have `created_at` and `id`; None on the last page."""
    return binding.encode(Position.at(rows[-1].created_at, rows[-1].id)) if more else None


def _binding(name: str, agent_id: UUID, *filters: str | None) -> Binding:
    return Binding(name, (str(agent_id), *filters))


async def list_tool_calls(call: Call) -> web.StreamResponse:
    """A page of tool calls, oldest first."""
    query: ToolCallsQuery = call.query
    state, kind = given(query.state), given(query.type)
    binding = _binding("tool_calls", call.ids["agentID"], state, kind)
    page = await reads.list_tool_calls(
        call.context.deps,
        call.principal,
        agent_path(call),
        state=state,
        call_type=kind,
        after=time_key(binding, query),
        limit=query.limit,
    )
    data = [encode.tool_call(row) for row in page.rows]
    return reply(200, ListToolCallsResponse(data=data, next_cursor=next_cursor(binding, page.rows, more=page.more)))


async def submit_result(call: Call) -> web.StreamResponse:
    """The result of a custom call; the first one wins."""
    body: SubmitToolCallResultRequest = call.body
    done = await results.submit_result(
        call.context.deps,
        call.principal,
        agent_path(call),
        call.ids["toolCallID"],
        body.outcome,
        decode.result_blocks(body.content_blocks),
    )
    result = ToolResult(
        event_id=public_id(IdKind.EVENT, done.event.id),
        agent_id=public_id(IdKind.AGENT, done.call.agent_id),
        tool_call_id=public_id(IdKind.TOOL_CALL, done.call.id),
        outcome=body.outcome,
        content_blocks=encode.raw(done.content),
        created_at=done.event.created_at,
    )
    return reply(201, SubmitToolCallResultResponse(tool_call=encode.tool_call(done.call), tool_result=result))


async def list_interactions(call: Call) -> web.StreamResponse:
    """A page of interactions, oldest first."""
    query: InteractionsQuery = call.query
    state = given(query.state)
    binding = _binding("interactions", call.ids["agentID"], state)
    agent, page = await reads.list_interactions(
        call.context.deps,
        call.principal,
        agent_path(call),
        state=state,
        after=time_key(binding, query),
        limit=query.limit,
    )
    data = [encode.interaction(row, agent.org_id, agent.project_id) for row in page.rows]
    cursor = next_cursor(binding, page.rows, more=page.more)
    return reply(200, ListAgentInteractionsResponse(data=data, next_cursor=cursor))


async def resolve_interaction(call: Call) -> web.StreamResponse:
    """The answers to a form; the same answers by the same caller may be sent again."""
    body: ResolveAgentInteractionRequest = call.body
    row = await interactions.resolve(
        call.context.deps,
        call.principal,
        agent_path(call),
        call.ids["interactionID"],
        decode.answers(body.answers),
        actor=decode.actor(body.actor),
    )
    return reply(200, encode.interaction(row, call.ids["orgID"], call.ids["projectID"]))


ROUTES: Final = (
    Route(
        method="GET",
        path=f"{AGENT_PATH}/tool-calls",
        operation_id="listToolCalls",
        handler=list_tool_calls,
        path_ids=AGENT,
        query=ToolCallsQuery,
        responses={200: ListToolCallsResponse},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
    Route(
        method="POST",
        path=f"{AGENT_PATH}/tool-calls/{{toolCallID}}/result",
        operation_id="submitToolCallResult",
        handler=submit_result,
        path_ids={**AGENT, "toolCallID": IdKind.TOOL_CALL},
        body=SubmitToolCallResultRequest,
        body_limit=MEDIA_BODY_LIMIT,
        responses={201: SubmitToolCallResultResponse},
    ),
    Route(
        method="GET",
        path=f"{AGENT_PATH}/interactions",
        operation_id="listAgentInteractions",
        handler=list_interactions,
        path_ids=AGENT,
        query=InteractionsQuery,
        responses={200: ListAgentInteractionsResponse},
    ),
    Route(
        method="POST",
        path=f"{AGENT_PATH}/interactions/{{interactionID}}/resolve",
        operation_id="resolveAgentInteraction",
        handler=resolve_interaction,
        path_ids={**AGENT, "interactionID": IdKind.INTERACTION},
        body=ResolveAgentInteractionRequest,
        responses={200: AgentInteraction},
    ),
)
