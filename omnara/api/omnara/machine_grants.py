"""Routes of projects' grants of machines, given one by one."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, given, id_in_body, project_scope
from omnara.api.omnara.machine_shapes import machine, machine_grant, machine_summary
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.machines import (
    CreateProjectMachineGrantRequest,
    CreateProjectMachineGrantResponse,
    ListProjectMachineGrantsResponse,
    ProjectMachineGrantListItem,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.engine.machines import closing_down, machine_grants
from omnara.ids import IdKind

GRANTS_PATH = f"{PROJECT_PATH}/machine-grants"


async def create_grant(call: Call) -> web.StreamResponse:
    """The right of a project to use a machine; a used Idempotency-Key returns what it made."""
    body: CreateProjectMachineGrantRequest = call.body
    made = await machine_grants.create_grant(
        call.context.deps,
        call.principal,
        project_scope(call),
        id_in_body(IdKind.MACHINE, body.machine_id),
        given(body.description) or "",
        given(body.metadata) or {},
        call.key,
    )
    answer = CreateProjectMachineGrantResponse(grant=machine_grant(made.row), machine=machine(made.machine))
    return reply(201 if made.created else 200, answer)


async def list_grants(call: Call) -> web.StreamResponse:
    """A page of the machines that a project was given one by one."""
    query: ResourceQuery = call.query
    scope = project_scope(call)
    listing = ResourceList("machine_grants", query, str(scope.project_id))
    rows = await machine_grants.list_grants(call.context.deps, call.principal, scope, listing.order)
    data = [
        ProjectMachineGrantListItem(grant=machine_grant(found.row), machine=machine_summary(found.machine))
        for _, found in listing.page(rows)
    ]
    return reply(200, ListProjectMachineGrantsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def delete_grant(call: Call) -> web.StreamResponse:
    """The end of the right, and of what the project's agents run there."""
    await closing_down.delete_grant(call.context.deps, call.principal, project_scope(call), call.ids["grantID"])
    return no_content()


ROUTES: Final = (
    Route(
        method="POST",
        path=GRANTS_PATH,
        operation_id="createProjectMachineGrant",
        handler=create_grant,
        path_ids=PROJECT,
        body=CreateProjectMachineGrantRequest,
        idempotent=True,
        responses={200: CreateProjectMachineGrantResponse, 201: CreateProjectMachineGrantResponse},
    ),
    Route(
        method="GET",
        path=GRANTS_PATH,
        operation_id="listProjectMachineGrants",
        handler=list_grants,
        path_ids=PROJECT,
        query=ResourceQuery,
        responses={200: ListProjectMachineGrantsResponse},
    ),
    Route(
        method="DELETE",
        path=f"{GRANTS_PATH}/{{grantID}}",
        operation_id="deleteProjectMachineGrant",
        handler=delete_grant,
        path_ids={**PROJECT, "grantID": IdKind.MACHINE_GRANT},
        responses={204: None},
    ),
)
