"""Grants of pools: which pools a project's agents may get machines from, and what differs for them.

Who may give one away is as for single machines, since a pool's machines can hold the organization's secrets.
Source: api.md §3, §8; machines.md §12; contract (updateProjectMachinePoolGrant).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import machine_pools
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.machine_pools import NewPoolGrant, PoolGrantRow, PoolOverrides, PoolRow, PoolSummaryRow, Sizes
from omnara.engine.deps import Deps
from omnara.engine.machines.access import manages, projects_of
from omnara.engine.machines.environment import keep_secrets
from omnara.engine.machines.pool_admin import locked_pool
from omnara.engine.machines.pool_providers import check_provider
from omnara.engine.machines.pool_settings import applied, check_sizes, differing, environment, narrowed
from omnara.engine.scope import project_in_scope
from omnara.errors import Conflict, IdempotencyKeyConflict, NotFound
from omnara.ids import new_uuid


class CreatedPoolGrant(msgspec.Struct, frozen=True):
    """A grant; not `created` when the key had made it before."""

    created: bool
    row: PoolGrantRow


class ListedPoolGrant(msgspec.Struct, frozen=True):
    """A grant with its pool."""

    row: PoolGrantRow
    pool: PoolSummaryRow


async def create_grant(
    deps: Deps, p: Principal, project: ProjectScope, pool_id: UUID, fields: Mapping[str, Any], key: str | None
) -> CreatedPoolGrant:
    """Let a project use a pool. Own transaction. `fields` are those of PoolOverrides and Sizes, objects as dicts.

    Raises NotFound, Forbidden, InvalidRequest, IdempotencyKeyConflict for a key that made something else, Conflict for
    a pool that the project may use already.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)
    overrides = applied(PoolOverrides(sizes=Sizes()), fields)

    async def work(connection: Connection) -> CreatedPoolGrant:
        pool = await _given_away(connection, p, project.org_id, pool_id)
        await _check(deps, connection, project, pool, overrides)
        new = NewPoolGrant(
            id=new_uuid(), org_id=project.org_id, project_id=project.project_id, pool_id=pool_id, idempotency_key=key
        )
        if await machine_pools.add_grant(connection, new, overrides):
            return CreatedPoolGrant(True, await _found(connection, project, new.id))
        row = None if key is None else await machine_pools.find_grant(connection, project.project_id, key=key)
        if row is None:
            raise Conflict("the project may use the machine pool already")
        if row.deleted_at is not None or row.pool_id != pool_id or differing(row.overrides, overrides):
            raise IdempotencyKeyConflict
        return CreatedPoolGrant(False, row)

    return await deps.db.run(work)


async def get_grant(deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID) -> PoolGrantRow:
    """Return a grant. Raises NotFound."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        return await _found(connection, project, grant_id)


async def list_grants(
    deps: Deps, p: Principal, project: ProjectScope, order: ListOrder
) -> list[tuple[str, ListedPoolGrant]]:
    """Return a project's grants with sort values; one more than the page when there are more."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        rows = await machine_pools.list_grants(connection, project.project_id, order)
    return [(key, ListedPoolGrant(row, pool)) for key, row, pool in rows]


async def update_grant(
    deps: Deps, p: Principal, project: ProjectScope, grant_id: UUID, changes: Mapping[str, Any]
) -> PoolGrantRow:
    """Change what differs from the pool; machines that exist stay as they are. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest.
    """
    project_in_scope(p, project, ProjectAction.ACCESS)

    async def work(connection: Connection) -> PoolGrantRow:
        before = await _found(connection, project, grant_id)
        pool = await locked_pool(connection, project.org_id, before.pool_id)
        before = await _found(connection, project, grant_id)
        overrides = applied(before.overrides, changes)
        await _check(deps, connection, project, pool, overrides)
        await machine_pools.change_grant(connection, grant_id, overrides)
        return await _found(connection, project, grant_id)

    return await deps.db.run(work)


async def _given_away(connection: Connection, p: Principal, org_id: UUID, pool_id: UUID) -> PoolRow:
    """Lock a pool that the caller may give to a project. Who only sees it in another project does not find it here."""
    if not manages(p, org_id):
        rights = projects_of(p, org_id, ProjectAction.ACCESS)
        if not await machine_pools.granted_to(connection, pool_id, rights):
            raise NotFound("machine pool")
    return await locked_pool(connection, org_id, pool_id)


async def _check(
    deps: Deps, connection: Connection, project: ProjectScope, pool: PoolRow, overrides: PoolOverrides
) -> None:
    check_sizes(narrowed(pool.settings.sizes, overrides.sizes))
    options = msgspec.json.decode(pool.settings.default_machine_provider_options)
    options |= msgspec.json.decode(overrides.default_machine_provider_options_overlay)
    left = {name: value for name, value in options.items() if value is not None}
    check_provider(deps.places, pool.provider, pool.settings.provider_config, msgspec.json.encode(left).decode())
    _, secrets = environment(overrides)
    await keep_secrets(connection, project.org_id, secrets.values(), project_id=project.project_id)


async def _found(connection: Connection, project: ProjectScope, grant_id: UUID) -> PoolGrantRow:
    row = await machine_pools.find_grant(connection, project.project_id, grant_id=grant_id)
    if row is None:
        raise NotFound("machine pool grant")
    return row
