"""Routes of machines: made, connected, shown, changed, deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.access.roles import CallerRule
from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, given, id_in_body, project_scope
from omnara.api.omnara.machine_shapes import (
    access_sources,
    machine,
    machine_grant,
    secret_ids,
    summary_fields,
    token_record,
)
from omnara.api.omnara.orgs import ORG, ORG_PATH
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.machines import (
    ConnectBYOMachineRequest,
    ConnectBYOMachineResponse,
    CreateMachineRequest,
    ListVisibleMachinesResponse,
    Machine,
    MachineAccess,
    MachineSourceKind,
    UpdateMachineRequest,
    VisibleMachine,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.engine.machines import admin, closing_down
from omnara.engine.machines.admin import ListedMachine, MachineFields
from omnara.ids import IdKind

MACHINE = {**ORG, "machineID": IdKind.MACHINE}
MACHINES_PATH = f"{ORG_PATH}/machines"
MACHINE_PATH = f"{MACHINES_PATH}/{{machineID}}"


class MachinesQuery(ResourceQuery, frozen=True, kw_only=True):
    """Which machines to list."""

    source_kind: MachineSourceKind | UnsetType = UNSET


async def create_machine(call: Call) -> web.StreamResponse:
    """A new machine; a used Idempotency-Key returns what it made."""
    body: CreateMachineRequest = call.body
    fields = MachineFields(
        display_name=body.display_name,
        description=given(body.description) or "",
        cwd=given(body.cwd) or "",
        env=given(body.env) or {},
        secret_env=secret_ids(given(body.secret_env) or {}),
        metadata=given(body.metadata) or {},
    )
    made = await admin.create_machine(call.context.deps, call.principal, call.ids["orgID"], fields, call.key)
    return reply(201 if made.created else 200, machine(made.row))


async def connect_machine(call: Call) -> web.StreamResponse:
    """A new machine with a token for its daemon, shown this once."""
    body: ConnectBYOMachineRequest = call.body
    projects = [id_in_body(IdKind.PROJECT, text) for text in body.project_ids]
    made = await admin.connect_machine(
        call.context.deps, call.principal, call.ids["orgID"], body.display_name, projects
    )
    answer = ConnectBYOMachineResponse(
        machine=machine(made.row),
        token=made.token.text,
        token_record=token_record(made.token_row),
        project_grants=[machine_grant(row) for row in made.grants],
    )
    return reply(201, answer)


async def list_machines(call: Call) -> web.StreamResponse:
    """A page of the machines that the caller sees."""
    query: MachinesQuery = call.query
    org_id, kind = call.ids["orgID"], given(query.source_kind)
    listing = ResourceList("machines", query, str(org_id), str(call.principal.id), kind)
    rows = await admin.list_machines(call.context.deps, call.principal, org_id, kind, listing.order)
    return _page(listing, rows)


async def list_project_machines(call: Call) -> web.StreamResponse:
    """A page of the machines that a project may use."""
    query: MachinesQuery = call.query
    scope, kind = project_scope(call), given(query.source_kind)
    listing = ResourceList("project_machines", query, str(scope.project_id), kind)
    rows = await admin.list_project_machines(call.context.deps, call.principal, scope, kind, listing.order)
    return _page(listing, rows)


async def get_machine(call: Call) -> web.StreamResponse:
    """One machine."""
    found = await admin.get_machine(call.context.deps, call.principal, call.ids["orgID"], call.ids["machineID"])
    return reply(200, machine(found.row))


async def update_machine(call: Call) -> web.StreamResponse:
    """Another directory or environment for commands."""
    body: UpdateMachineRequest = call.body
    secret_env = given(body.secret_env)
    row = await admin.update_machine(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["machineID"],
        cwd=given(body.cwd),
        env=given(body.env),
        secret_env=None if secret_env is None else secret_ids(secret_env),
    )
    return reply(200, machine(row))


async def delete_machine(call: Call) -> web.StreamResponse:
    """The end of a machine and of all that runs on it."""
    await closing_down.delete_machine(call.context.deps, call.principal, call.ids["orgID"], call.ids["machineID"])
    return no_content()


def _page(listing: ResourceList, rows: Sequence[tuple[str, ListedMachine]]) -> web.Response:
    data = [
        VisibleMachine(
            **summary_fields(found.row),
            access=MachineAccess(can_manage=found.can_manage, sources=access_sources(found.grants, found.can_manage)),
        )
        for _, found in listing.page(rows)
    ]
    return reply(200, ListVisibleMachinesResponse(data=data, next_cursor=listing.next_cursor(rows)))


ROUTES: Final = (
    Route(
        method="POST",
        path=MACHINES_PATH,
        operation_id="createMachine",
        handler=create_machine,
        path_ids=ORG,
        body=CreateMachineRequest,
        idempotent=True,
        responses={200: Machine, 201: Machine},
    ),
    Route(
        method="GET",
        path=MACHINES_PATH,
        operation_id="listVisibleMachines",
        handler=list_machines,
        path_ids=ORG,
        query=MachinesQuery,
        responses={200: ListVisibleMachinesResponse},
    ),
    Route(
        method="POST",
        path=f"{MACHINES_PATH}/connect",
        operation_id="connectBYOMachine",
        handler=connect_machine,
        path_ids=ORG,
        body=ConnectBYOMachineRequest,
        caller=CallerRule.USER,
        responses={201: ConnectBYOMachineResponse},
        errors=frozenset({400, 401, 403, 404, 409, 500, 503}),
    ),
    Route(
        method="GET",
        path=MACHINE_PATH,
        operation_id="getMachine",
        handler=get_machine,
        path_ids=MACHINE,
        responses={200: Machine},
    ),
    Route(
        method="PATCH",
        path=MACHINE_PATH,
        operation_id="updateMachine",
        handler=update_machine,
        path_ids=MACHINE,
        body=UpdateMachineRequest,
        responses={200: Machine},
    ),
    Route(
        method="DELETE",
        path=MACHINE_PATH,
        operation_id="deleteMachine",
        handler=delete_machine,
        path_ids=MACHINE,
        responses={204: None},
        errors=frozenset({400, 401, 403, 404, 503}),
    ),
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/machines",
        operation_id="listVisibleProjectMachines",
        handler=list_project_machines,
        path_ids=PROJECT,
        query=MachinesQuery,
        responses={200: ListVisibleMachinesResponse},
    ),
)
