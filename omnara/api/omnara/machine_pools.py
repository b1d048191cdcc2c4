"""Routes of machine pools."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.body import check_depth
from omnara.api.omnara.decode import id_in_body
from omnara.api.omnara.encode import public, raw
from omnara.api.omnara.machine_shapes import public_secret_ids
from omnara.api.omnara.orgs import ORG, ORG_PATH
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.machine_pools import (
    ListMachinePoolsResponse,
    MachinePool,
    MachinePoolUsage,
    NewMachinePool,
    UpdateMachinePoolRequest,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.machine_pools import PoolRow, PoolUsage
from omnara.engine.machines import closing_down, pool_admin
from omnara.ids import IdKind, encode

POOL = {**ORG, "poolID": IdKind.MACHINE_POOL}
POOLS_PATH = f"{ORG_PATH}/machine-pools"
POOL_PATH = f"{POOLS_PATH}/{{poolID}}"
_SECRET_ENVS: Final = frozenset({"default_machine_secret_env", "default_machine_secret_env_overlay"})


async def create_pool(call: Call) -> web.StreamResponse:
    """A new pool; 200 for the same settings again."""
    body: NewMachinePool = call.body
    fields = stated(body)
    del fields["provider"]
    made = await pool_admin.create_pool(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        body.provider,
        fields.pop("max_total_machines"),
        fields,
    )
    return reply(201 if made.created else 200, machine_pool(made.row))


async def list_pools(call: Call) -> web.StreamResponse:
    """A page of pools with what is used of them."""
    query: ResourceQuery = call.query
    org_id = call.ids["orgID"]
    listing = ResourceList("machine_pools", query, str(org_id))
    rows = await pool_admin.list_pools(call.context.deps, call.principal, org_id, listing.order)
    data = [machine_pool(found.row, found.usage) for _, found in listing.page(rows)]
    return reply(200, ListMachinePoolsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def get_pool(call: Call) -> web.StreamResponse:
    """One pool."""
    row = await pool_admin.get_pool(call.context.deps, call.principal, call.ids["orgID"], call.ids["poolID"])
    return reply(200, machine_pool(row))


async def update_pool(call: Call) -> web.StreamResponse:
    """Other settings; what is not said stays."""
    body: UpdateMachinePoolRequest = call.body
    row = await pool_admin.update_pool(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["poolID"], stated(body)
    )
    return reply(200, machine_pool(row))


async def delete_pool(call: Call) -> web.StreamResponse:
    """The end of a pool and of its machines."""
    await closing_down.delete_pool(call.context.deps, call.principal, call.ids["orgID"], call.ids["poolID"])
    return no_content()


def stated(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that a body holds, as the use cases take them. Raises ValidationFailed (ids, deep JSON)."""
    found: dict[str, Any] = {}
    for field in body.__struct_fields__:
        value = getattr(body, field)
        if isinstance(value, UnsetType):
            continue
        if field in _SECRET_ENVS:
            value = {name: _secret(text) for name, text in value.items()}
        elif field == "provider_auth_secret_id":
            value = _secret(value)
        check_depth(value)
        found[field] = value
    return found


def _secret(text: str | None) -> UUID | None:
    return None if text is None else id_in_body(IdKind.SECRET, text)


def machine_pool(row: PoolRow, usage: PoolUsage | None = None) -> MachinePool:
    """A pool; with `usage` in lists."""
    settings, kind = row.settings, row.management_kind
    management_kind: Any = kind
    return MachinePool(
        **msgspec.structs.asdict(settings.sizes),
        id=encode(IdKind.MACHINE_POOL, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        name=settings.name,
        management_kind=management_kind,
        description=settings.description,
        provider=row.provider,
        default_machine_env=raw(settings.default_machine_env),
        default_machine_secret_env=public_secret_ids(settings.default_machine_secret_env),
        default_machine_provider_options=raw(settings.default_machine_provider_options),
        default_cwd=settings.default_cwd,
        provider_auth_secret_id=public(IdKind.SECRET, settings.provider_auth_secret_id),
        provider_config=raw(settings.provider_config),
        runtime_protection_enabled=settings.runtime_protection_enabled,
        max_total_machines=settings.max_total_machines,
        delete_after_idle_minutes=settings.delete_after_idle_minutes,
        metadata=raw(settings.metadata),
        created_at=row.created_at,
        updated_at=row.updated_at,
        usage=UNSET if usage is None else MachinePoolUsage(**msgspec.structs.asdict(usage)),
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=POOLS_PATH,
        operation_id="createMachinePool",
        handler=create_pool,
        path_ids=ORG,
        body=NewMachinePool,
        responses={200: MachinePool, 201: MachinePool},
        further_errors=frozenset({422}),
    ),
    Route(
        method="GET",
        path=POOLS_PATH,
        operation_id="listMachinePools",
        handler=list_pools,
        path_ids=ORG,
        query=ResourceQuery,
        responses={200: ListMachinePoolsResponse},
    ),
    Route(
        method="GET",
        path=POOL_PATH,
        operation_id="getMachinePool",
        handler=get_pool,
        path_ids=POOL,
        responses={200: MachinePool},
    ),
    Route(
        method="PUT",
        path=POOL_PATH,
        operation_id="updateMachinePool",
        handler=update_pool,
        path_ids=POOL,
        body=UpdateMachinePoolRequest,
        responses={200: MachinePool},
    ),
    Route(
        method="DELETE",
        path=POOL_PATH,
        operation_id="deleteMachinePool",
        handler=delete_pool,
        path_ids=POOL,
        responses={204: None},
    ),
)
