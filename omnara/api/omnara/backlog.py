"""Routes of the messages that wait for an agent. Source: api.md §7 (cursor), §10."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from aiohttp import web

from omnara.api.cursors import Binding, Position
from omnara.api.omnara import encode
from omnara.api.omnara.decode import AGENT, AGENT_PATH, PageQuery, agent_path, given, id_in_body
from omnara.api.omnara.types.backlog import (
    ListAgentInputsResponse,
    MoveQueuedBacklogInputRequest,
    OKResponse,
    PromoteQueuedInputToSteeringRequest,
)
from omnara.api.routing import Call, Route, reply
from omnara.engine import backlog
from omnara.errors import InvalidRequest
from omnara.ids import IdKind

_INPUT: Final = {**AGENT, "inputID": IdKind.AGENT_INPUT}
_INPUT_PATH: Final = f"{AGENT_PATH}/inputs/{{inputID}}"
_MAX_RANK_DIGITS: Final = 18


async def list_backlog(call: Call) -> web.StreamResponse:
    """A page of the queue, in the order of admission."""
    query: PageQuery = call.query
    binding = Binding("backlog", (str(call.ids["agentID"]),))
    cursor = given(query.cursor)
    after = None if cursor is None else _place(binding.decode(cursor))
    page = await backlog.list_queued(
        call.context.deps, call.principal, agent_path(call), after=after, limit=query.limit
    )
    last = page.rows[-1] if page.more else None
    return reply(
        200,
        ListAgentInputsResponse(
            data=[encode.agent_input(row.input) for row in page.rows],
            next_cursor=None if last is None else binding.encode(Position(str(last.rank), last.input.id)),
        ),
    )


def _place(position: Position) -> tuple[int, UUID]:
    if not position.key.isascii() or not position.key.isdigit() or len(position.key) > _MAX_RANK_DIGITS:
        raise InvalidRequest("the cursor is not valid")
    return int(position.key), position.id


async def cancel_input(call: Call) -> web.StreamResponse:
    """Take a queued message back."""
    await backlog.cancel(call.context.deps, call.principal, agent_path(call), call.ids["inputID"])
    return reply(200, OKResponse(ok=True))


async def move_input(call: Call) -> web.StreamResponse:
    """Move a queued message."""
    body: MoveQueuedBacklogInputRequest = call.body
    anchor = given(body.anchor_input_id)
    await backlog.move(
        call.context.deps,
        call.principal,
        agent_path(call),
        call.ids["inputID"],
        body.position,
        None if anchor is None else id_in_body(IdKind.AGENT_INPUT, anchor),
    )
    return reply(200, OKResponse(ok=True))


async def promote_input(call: Call) -> web.StreamResponse:
    """Let a queued message steer."""
    body: PromoteQueuedInputToSteeringRequest | None = call.body
    await backlog.promote(
        call.context.deps,
        call.principal,
        agent_path(call),
        call.ids["inputID"],
        cancel_open_interactions=body is not None and (given(body.cancel_open_interactions) or False),
    )
    return reply(200, OKResponse(ok=True))


async def demote_input(call: Call) -> web.StreamResponse:
    """Put a steering message that still waits at the end of the queue."""
    await backlog.demote(call.context.deps, call.principal, agent_path(call), call.ids["inputID"])
    return reply(200, OKResponse(ok=True))


ROUTES: Final = (
    Route(
        method="GET",
        path=f"{AGENT_PATH}/inputs/backlog",
        operation_id="listQueuedBacklogInputs",
        handler=list_backlog,
        path_ids=AGENT,
        query=PageQuery,
        responses={200: ListAgentInputsResponse},
    ),
    Route(
        method="POST",
        path=f"{_INPUT_PATH}/cancel",
        operation_id="cancelQueuedBacklogInput",
        handler=cancel_input,
        path_ids=_INPUT,
        responses={200: OKResponse},
    ),
    Route(
        method="POST",
        path=f"{_INPUT_PATH}/move",
        operation_id="moveQueuedBacklogInput",
        handler=move_input,
        path_ids=_INPUT,
        body=MoveQueuedBacklogInputRequest,
        responses={200: OKResponse},
    ),
    Route(
        method="POST",
        path=f"{_INPUT_PATH}/promote_to_steering",
        operation_id="promoteQueuedInputToSteering",
        handler=promote_input,
        path_ids=_INPUT,
        body=PromoteQueuedInputToSteeringRequest,
        body_required=False,
        responses={200: OKResponse},
    ),
    Route(
        method="POST",
        path=f"{_INPUT_PATH}/demote_to_queued",
        operation_id="demoteSteeringInputToQueued",
        handler=demote_input,
        path_ids=_INPUT,
        responses={200: OKResponse},
    ),
)
