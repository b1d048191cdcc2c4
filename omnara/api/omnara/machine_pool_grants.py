"""Routes of projects' grants of machine pools."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, id_in_body, project_scope
from omnara.api.omnara.encode import raw
from omnara.api.omnara.machine_pools import stated
from omnara.api.omnara.machine_shapes import public_secret_ids
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.machine_pools import (
    CreateProjectMachinePoolGrantRequest,
    ListProjectMachinePoolGrantsResponse,
    MachinePoolSummary,
    ProjectMachinePoolGrant,
    ProjectMachinePoolGrantListItem,
    UpdateProjectMachinePoolGrantRequest,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.machine_pools import PoolGrantRow, PoolSummaryRow
from omnara.engine.machines import closing_down, pool_grants
from omnara.ids import IdKind, encode

GRANT = {**PROJECT, "poolGrantID": IdKind.POOL_GRANT}
GRANTS_PATH = f"{PROJECT_PATH}/machine-pool-grants"
GRANT_PATH = f"{GRANTS_PATH}/{{poolGrantID}}"


async def create_grant(call: Call) -> web.StreamResponse:
    """The right of a project to machines of a pool; a used Idempotency-Key returns what it made."""
    body: CreateProjectMachinePoolGrantRequest = call.body
    fields = stated(body)
    pool_id = id_in_body(IdKind.MACHINE_POOL, fields.pop("machine_pool_id"))
    made = await pool_grants.create_grant(
        call.context.deps, call.principal, project_scope(call), pool_id, fields, call.key
    )
    return reply(201 if made.created else 200, _grant(made.row))


async def list_grants(call: Call) -> web.StreamResponse:
    """A page of the pools that a project may use."""
    query: ResourceQuery = call.query
    scope = project_scope(call)
    listing = ResourceList("machine_pool_grants", query, str(scope.project_id))
    rows = await pool_grants.list_grants(call.context.deps, call.principal, scope, listing.order)
    data = [
        ProjectMachinePoolGrantListItem(grant=_grant(found.row), machine_pool=_pool(found.row, found.pool))
        for _, found in listing.page(rows)
    ]
    return reply(200, ListProjectMachinePoolGrantsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def get_grant(call: Call) -> web.StreamResponse:
    """One grant."""
    row = await pool_grants.get_grant(call.context.deps, call.principal, project_scope(call), call.ids["poolGrantID"])
    return reply(200, _grant(row))


async def update_grant(call: Call) -> web.StreamResponse:
    """Other differences from the pool."""
    body: UpdateProjectMachinePoolGrantRequest = call.body
    row = await pool_grants.update_grant(
        call.context.deps, call.principal, project_scope(call), call.ids["poolGrantID"], stated(body)
    )
    return reply(200, _grant(row))


async def delete_grant(call: Call) -> web.StreamResponse:
    """The end of the right and of the machines that the project got by it."""
    await closing_down.delete_pool_grant(
        call.context.deps, call.principal, project_scope(call), call.ids["poolGrantID"]
    )
    return no_content()


def _grant(row: PoolGrantRow) -> ProjectMachinePoolGrant:
    said = row.overrides
    return ProjectMachinePoolGrant(
        **msgspec.structs.asdict(said.sizes),
        id=encode(IdKind.POOL_GRANT, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        project_id=encode(IdKind.PROJECT, row.project_id),
        machine_pool_id=encode(IdKind.MACHINE_POOL, row.pool_id),
        description=said.description,
        default_machine_env_overlay=raw(said.default_machine_env_overlay),
        default_machine_secret_env_overlay=public_secret_ids(said.default_machine_secret_env_overlay),
        default_machine_provider_options_overlay=raw(said.default_machine_provider_options_overlay),
        default_cwd=said.default_cwd,
        max_total_machines=said.max_total_machines,
        delete_after_idle_minutes=said.delete_after_idle_minutes,
        metadata=raw(said.metadata),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _pool(grant: PoolGrantRow, row: PoolSummaryRow) -> MachinePoolSummary:
    management_kind: Any = row.management_kind
    return MachinePoolSummary(
        id=encode(IdKind.MACHINE_POOL, grant.pool_id),
        org_id=encode(IdKind.ORG, grant.org_id),
        name=row.name,
        management_kind=management_kind,
        description=row.description,
        provider=row.provider,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=GRANTS_PATH,
        operation_id="createProjectMachinePoolGrant",
        handler=create_grant,
        path_ids=PROJECT,
        body=CreateProjectMachinePoolGrantRequest,
        idempotent=True,
        responses={200: ProjectMachinePoolGrant, 201: ProjectMachinePoolGrant},
    ),
    Route(
        method="GET",
        path=GRANTS_PATH,
        operation_id="listProjectMachinePoolGrants",
        handler=list_grants,
        path_ids=PROJECT,
        query=ResourceQuery,
        responses={200: ListProjectMachinePoolGrantsResponse},
    ),
    Route(
        method="GET",
        path=GRANT_PATH,
        operation_id="getProjectMachinePoolGrant",
        handler=get_grant,
        path_ids=GRANT,
        responses={200: ProjectMachinePoolGrant},
    ),
    Route(
        method="PATCH",
        path=GRANT_PATH,
        operation_id="updateProjectMachinePoolGrant",
        handler=update_grant,
        path_ids=GRANT,
        body=UpdateProjectMachinePoolGrantRequest,
        responses={200: ProjectMachinePoolGrant},
    ),
    Route(
        method="DELETE",
        path=GRANT_PATH,
        operation_id="deleteProjectMachinePoolGrant",
        handler=delete_grant,
        path_ids=GRANT,
        responses={204: None},
    ),
)
