"""Routes that read the log: events, turns, and the stream."""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from omnara.access.principals import Principal
from omnara.api import params, sse
from omnara.api.event_json import Owner
from omnara.api.omnara import encode
from omnara.api.omnara.decode import AGENT, AGENT_PATH, agent_path, given
from omnara.api.omnara.types.events import (
    AgentTurn,
    ListAgentEventsResponse,
    ListAgentTurnsResponse,
    ListTurnEventsResponse,
)
from omnara.api.omnara.types.stream import AgentEventStreamData
from omnara.api.routing import Call, EventStream, Route, reply
from omnara.db.agents import AgentRow
from omnara.db.streams import Reading
from omnara.engine import reads
from omnara.engine.reads import EventPage, Turn
from omnara.errors import Unauthorized
from omnara.ids import IdKind
from omnara.ids import encode as public_id

Boundary = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int64"})]
EventLimit = Annotated[int, Meta(ge=1, le=500, extra_json_schema={"format": "int32"})]
TurnLimit = Annotated[int, Meta(ge=1, le=100, extra_json_schema={"format": "int32"})]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page of the log begins; `before_sequence` outranks `after_sequence`."""

    before_sequence: Boundary | UnsetType = UNSET
    after_sequence: Boundary | UnsetType = UNSET
    limit: EventLimit = 100


class TurnEventsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page of a turn ends."""

    before_sequence: Boundary | UnsetType = UNSET
    limit: EventLimit = 100


class TurnsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page of turns begins."""

    before_turn_sequence: Boundary | UnsetType = UNSET
    limit: TurnLimit = 25


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream begins, and whether it shows deltas."""

    after_sequence: Boundary | UnsetType = UNSET
    stream_deltas: bool | UnsetType = UNSET


def owner_of(agent: AgentRow) -> Owner:
    """The common part of the events of an agent."""
    return Owner.of(agent.org_id, agent.project_id, agent.id)


def reading(caller: Principal, project_id: UUID) -> Reading:
    """The right by which a stream is opened. Every principal of a request has a key."""
    if caller.key_id is None:
        raise Unauthorized
    return Reading(caller.key_id, project_id)


async def list_events(call: Call) -> web.StreamResponse:
    """A page of the log, forward from a boundary or backward from the end. Source: api.md §7."""
    query: EventsQuery = call.query
    deps, p, path = call.context.deps, call.principal, agent_path(call)
    if not isinstance(query.before_sequence, UnsetType):
        page = await reads.events_before(deps, p, path, query.before_sequence, query.limit)
        first = page.rows[0].sequence if page.rows else None
        boundary = max(query.before_sequence - 1, 0)
        return reply(200, _events(page, boundary, before=first if page.more else None))
    boundary = given(query.after_sequence) or 0
    page = await reads.events_after(deps, p, path, boundary, query.limit)
    return reply(200, _events(page, boundary))


def _events(page: EventPage, boundary: int, *, before: int | UnsetType | None = UNSET) -> ListAgentEventsResponse:
    owner = owner_of(page.agent)
    return ListAgentEventsResponse(
        data=[encode.event(owner, row) for row in page.rows],
        next_after_sequence=page.rows[-1].sequence if page.rows else boundary,
        next_before_sequence=before,
        has_more=page.more,
    )


async def list_turns(call: Call) -> web.StreamResponse:
    """A page of turns, newest first."""
    query: TurnsQuery = call.query
    before = given(query.before_turn_sequence) or 0
    page = await reads.list_turns(call.context.deps, call.principal, agent_path(call), before, query.limit)
    owner = owner_of(page.agent)
    oldest = page.rows[-1].row.turn_sequence if page.more else None
    turns = [_turn(owner, page.agent, turn) for turn in page.rows]
    return reply(200, ListAgentTurnsResponse(data=turns, next_before_turn_sequence=oldest))


def _turn(owner: Owner, agent: AgentRow, turn: Turn) -> AgentTurn:
    latest, semantic = turn.latest, turn.latest_semantic
    return AgentTurn(
        id=public_id(IdKind.TURN, turn.row.id),
        agent_id=public_id(IdKind.AGENT, agent.id),
        turn_sequence=turn.row.turn_sequence,
        event_count=turn.event_count,
        opening_events=[encode.event(owner, row) for row in turn.openings],
        latest_event=UNSET if latest is None else encode.event(owner, latest),
        latest_semantic_event=UNSET if semantic is None else encode.event(owner, semantic),
        started_at=turn.row.started_at,
        updated_at=turn.row.started_at if latest is None else latest.created_at,
    )


async def list_turn_events(call: Call) -> web.StreamResponse:
    """A page of one turn's events, from its end backward."""
    query: TurnEventsQuery = call.query
    before = given(query.before_sequence) or 0
    page = await reads.list_turn_events(
        call.context.deps, call.principal, agent_path(call), call.ids["turnID"], before, query.limit
    )
    owner = owner_of(page.agent)
    data = [encode.event(owner, row) for row in page.rows]
    return reply(
        200, ListTurnEventsResponse(data=data, next_before_sequence=page.rows[0].sequence if page.more else None)
    )


async def stream_events(call: Call) -> web.StreamResponse:
    """The event stream. A Last-Event-ID outranks `after_sequence`. Source: api.md §11."""
    query: StreamQuery = call.query
    last = params.last_event_id(call.request)
    after = last if last is not None else given(query.after_sequence) or 0
    agent = await reads.get_agent(call.context.deps, call.principal, agent_path(call))
    return await sse.serve(
        call.request,
        call.context.hub,
        owner_of(agent),
        agent_id=agent.id,
        reading=reading(call.principal, agent.project_id),
        after=after,
        deltas=given(query.stream_deltas) or False,
    )


_READ_ERRORS: Final = frozenset({400, 401, 403, 404, 503})

ROUTES: Final = (
    Route(
        method="GET",
        path=f"{AGENT_PATH}/events",
        operation_id="listEvents",
        handler=list_events,
        path_ids=AGENT,
        query=EventsQuery,
        responses={200: ListAgentEventsResponse},
        errors=_READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{AGENT_PATH}/events/stream",
        operation_id="streamEvents",
        handler=stream_events,
        path_ids=AGENT,
        query=StreamQuery,
        responses={200: EventStream(AgentEventStreamData)},
        errors=_READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{AGENT_PATH}/turns",
        operation_id="listTurns",
        handler=list_turns,
        path_ids=AGENT,
        query=TurnsQuery,
        responses={200: ListAgentTurnsResponse},
        errors=_READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{AGENT_PATH}/turns/{{turnID}}/events",
        operation_id="listTurnEvents",
        handler=list_turn_events,
        path_ids={**AGENT, "turnID": IdKind.TURN},
        query=TurnEventsQuery,
        responses={200: ListTurnEventsResponse},
        errors=_READ_ERRORS,
    ),
)
