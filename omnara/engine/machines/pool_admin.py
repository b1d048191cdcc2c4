"""Pools of machines: where the machines of agents come from, how large they may be and how many.

A pool's provider is for good, since its machines are there. What this release cannot make machines with is refused in
words. Pools that the cluster keeps are tuned by the tenant and nothing else.
Source: api.md §3, §8; machines.md §12; contract (updateMachinePool).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction
from omnara.db import machine_pools
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.machine_pools import PoolRow, PoolSettings, PoolUsage, Sizes
from omnara.engine.deps import Deps
from omnara.engine.machines.environment import keep_secrets
from omnara.engine.machines.pool_providers import check_provider, usable_provider
from omnara.engine.machines.pool_settings import applied, check_sizes, differing, environment
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, NotFound
from omnara.ids import new_uuid

MAX_POOLS: Final = 10_000
"""Per organization. Source: api.md §8 (resource caps)."""

_TUNABLE: Final = frozenset(
    {
        "default_machine_cpu",
        "default_machine_memory_mb",
        "default_machine_env",
        "default_machine_secret_env",
        "min_machine_cpu",
        "min_machine_memory_mb",
        "max_machine_cpu",
        "max_machine_memory_mb",
        "delete_after_idle_minutes",
    }
)
"""What a tenant may change of a pool that the cluster keeps. Source: contract (updateMachinePool)."""


class CreatedPool(msgspec.Struct, frozen=True):
    """A pool; not `created` when one with these settings was there."""

    created: bool
    row: PoolRow


class ListedPool(msgspec.Struct, frozen=True):
    """A pool with what is used of it."""

    row: PoolRow
    usage: PoolUsage


async def create_pool(
    deps: Deps, p: Principal, org_id: UUID, provider: str, max_total_machines: int, fields: Mapping[str, Any]
) -> CreatedPool:
    """Make a pool. Own transaction. `fields` are those of PoolSettings and Sizes, objects as dicts, `name` among them.

    Raises NotFound, Forbidden, InvalidRequest, Unprocessable for a provider that this release has not, Conflict for a
    name with other settings or at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    named = "provider_auth_secret_id" in fields
    usable_provider(deps.places, provider, deps.settings.public_url, credential=named)
    settings = applied(PoolSettings(name="", max_total_machines=max_total_machines, sizes=Sizes()), fields)
    _check(deps, provider, settings)

    async def work(connection: Connection) -> CreatedPool:
        await _keep(connection, org_id, settings)
        if await machine_pools.count(connection, org_id) >= MAX_POOLS:
            raise Conflict(f"an organization may have {MAX_POOLS} machine pools")
        created = await machine_pools.add(connection, new_uuid(), org_id, provider, settings)
        row = await machine_pools.find(connection, org_id, name=settings.name)
        if row is None or (not created and (row.provider != provider or differing(row.settings, settings))):
            raise Conflict("a machine pool of this name has other settings")
        return CreatedPool(created, row)

    return await deps.db.run(work)


async def get_pool(deps: Deps, p: Principal, org_id: UUID, pool_id: UUID) -> PoolRow:
    """Return a pool. Raises NotFound, Forbidden."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        return await found_pool(connection, org_id, pool_id)


async def list_pools(deps: Deps, p: Principal, org_id: UUID, order: ListOrder) -> list[tuple[str, ListedPool]]:
    """Return pools with sort values and usage; one more than the page when there are more. Raises as `get_pool`."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        rows = await machine_pools.list_pools(connection, org_id, order)
    return [(key, ListedPool(row, usage)) for key, row, usage in rows]


async def update_pool(deps: Deps, p: Principal, org_id: UUID, pool_id: UUID, changes: Mapping[str, Any]) -> PoolRow:
    """Change some settings, as `create_pool` takes them; machines that exist stay as they are. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name and for what only the cluster changes.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)

    async def work(connection: Connection) -> PoolRow:
        row = await locked_pool(connection, org_id, pool_id)
        settings = applied(row.settings, changes)
        different = differing(row.settings, settings)
        if row.management_kind == "cluster" and not different <= _TUNABLE:
            raise Conflict("the cluster keeps this machine pool; its sizes, environment and idle time may be changed")
        if not different:
            return row
        _check(deps, row.provider, settings)
        if different & {"default_machine_secret_env", "provider_auth_secret_id"}:
            await _keep(connection, org_id, settings)
        if not await machine_pools.change(connection, pool_id, settings):
            raise Conflict("a machine pool of this name exists")
        return await found_pool(connection, org_id, pool_id)

    return await deps.db.run(work)


async def found_pool(connection: Connection, org_id: UUID, pool_id: UUID) -> PoolRow:
    """Return a pool of an organization. Raises NotFound."""
    row = await machine_pools.find(connection, org_id, pool_id=pool_id)
    if row is None:
        raise NotFound("machine pool")
    return row


async def locked_pool(connection: Connection, org_id: UUID, pool_id: UUID) -> PoolRow:
    """Lock a pool, so that it is neither changed nor deleted nor gets machines meanwhile. Raises NotFound."""
    await machine_pools.lock(connection, org_id, pool_id)
    return await found_pool(connection, org_id, pool_id)


def _check(deps: Deps, provider: str, settings: PoolSettings) -> None:
    check_sizes(settings.sizes)
    check_provider(deps.places, provider, settings.provider_config, settings.default_machine_provider_options)


async def _keep(connection: Connection, org_id: UUID, settings: PoolSettings) -> None:
    _, secrets = environment(settings)
    await keep_secrets(connection, org_id, (*secrets.values(), settings.provider_auth_secret_id))
