"""The stream over all agents of a project, which the contract does not have: an extension."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from omnara.access.roles import ProjectAction
from omnara.api import project_stream
from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, given, project_scope
from omnara.api.omnara.events import reading
from omnara.api.omnara.types.events import AgentEvent
from omnara.api.project_cursor import MAX_LENGTH
from omnara.api.routing import Call, EventStream, Route
from omnara.api.types import Error
from omnara.engine.scope import project_in_scope
from omnara.errors import ValidationFailed


class ProjectStreamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stream begins: `after` is the id of a frame; without it `from` says whether it begins now."""

    after: Annotated[str, Meta(min_length=1, max_length=MAX_LENGTH)] | UnsetType = UNSET
    from_: Literal["now", "start"] = msgspec.field(default="now", name="from")


async def stream_project_events(call: Call) -> web.StreamResponse:
    """The events of all agents, present and future ones. A Last-Event-ID outranks `after`, which outranks `from`."""
    query: ProjectStreamQuery = call.query
    project = project_scope(call)
    project_in_scope(call.principal, project, ProjectAction.READ)
    last = call.request.headers.getall("Last-Event-ID", [])
    if len(last) > 1 or last == [""]:
        raise ValidationFailed("Last-Event-ID is the id of a frame")
    return await project_stream.serve(
        call.request,
        call.context.hub,
        project,
        reading=reading(call.principal, project.project_id),
        after=last[0] if last else given(query.after),
        from_start=query.from_ == "start",
    )


_DESCRIPTION: Final = (
    "An extension of the contract. The events of all agents of the project as Server-Sent Events: of present and "
    "future agents, archived ones too, for each agent in order and once. Begins now, at the beginning (from=start), "
    "or after a frame: send its id, which is opaque, as Last-Event-ID or after, to any replica. A frame with an id "
    "alone tells the place before the first event. After a failover of the database events of the last minute may "
    "come again."
)

ROUTES: Final = (
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/events/stream",
        operation_id="streamProjectEvents",
        handler=stream_project_events,
        path_ids=PROJECT,
        query=ProjectStreamQuery,
        responses={200: EventStream((AgentEvent, Error), opaque_ids=True)},
        errors=frozenset({400, 401, 403, 404, 503}),
        description=_DESCRIPTION,
    ),
)
