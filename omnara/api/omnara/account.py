"""Routes about the caller: who it is, which projects it sees, which tools there are."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.access.roles import CallerRule
from omnara.api.cursors import Binding
from omnara.api.omnara import encode
from omnara.api.omnara.decode import PageQuery
from omnara.api.omnara.tools import next_cursor, time_key
from omnara.api.omnara.types.account import CurrentUser, ListProjectsResponse, ToolCatalog
from omnara.api.routing import Call, Route, no_content, reply
from omnara.engine import members, reads
from omnara.ids import IdKind
from omnara.tools.registry import catalog


async def me(call: Call) -> web.StreamResponse:
    """The calling user with its organizations."""
    found = await reads.me(call.context.deps, call.principal)
    return reply(200, encode.current_user(found.user, found.orgs))


async def delete_me(call: Call) -> web.StreamResponse:
    """The end of the calling user."""
    await members.delete_user(call.context.deps, call.principal)
    call.context.authenticator.forget()
    return no_content()


async def list_projects(call: Call) -> web.StreamResponse:
    """A page of the projects that the caller sees in an organization, newest first."""
    query: PageQuery = call.query
    org_id = call.ids["orgID"]
    binding = Binding("projects", (str(org_id),))
    page = await reads.list_projects(
        call.context.deps, call.principal, org_id, after=time_key(binding, query), limit=query.limit
    )
    data = [encode.project(row, call.principal) for row in page.rows]
    return reply(200, ListProjectsResponse(data=data, next_cursor=next_cursor(binding, page.rows, more=page.more)))


async def tool_catalog(_call: Call) -> web.StreamResponse:
    """The tools that a config may switch on; the same for every caller."""
    return reply(200, catalog())


ROUTES: Final = (
    Route(
        method="GET",
        path="/api/v1/me",
        operation_id="getCurrentUser",
        handler=me,
        caller=CallerRule.USER,
        responses={200: CurrentUser},
        errors=frozenset({401, 403, 404, 503}),
    ),
    Route(
        method="DELETE",
        path="/api/v1/me",
        operation_id="deleteCurrentUser",
        handler=delete_me,
        caller=CallerRule.USER,
        responses={204: None},
    ),
    Route(
        method="GET",
        path="/api/v1/orgs/{orgID}/projects",
        operation_id="listVisibleProjects",
        handler=list_projects,
        path_ids={"orgID": IdKind.ORG},
        query=PageQuery,
        responses={200: ListProjectsResponse},
    ),
    Route(
        method="GET",
        path="/api/v1/tool-catalog",
        operation_id="getToolCatalog",
        handler=tool_catalog,
        responses={200: ToolCatalog},
        errors=frozenset({401, 403, 503}),
    ),
)
