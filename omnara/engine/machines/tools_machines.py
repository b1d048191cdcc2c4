"""The tools about machines themselves: which there are, how one is, one more, one less.

Making and deleting complete at once: the machine's row says what is to happen, and `provisioning` does it. Source:
engine.md §7 (completes on durable intent); machines.md §12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import agents, bindings
from omnara.db.bindings import BoundMachine, PoolName
from omnara.domain.config import Definition, PoolSource
from omnara.domain.content import StructuredDataBlock
from omnara.domain.processes import working_directory
from omnara.engine.machines.admission import MachineCapacity, Owner, PoolUnavailable, add_pool_machine
from omnara.engine.machines.approved import invalidated
from omnara.engine.machines.bindings import release
from omnara.engine.machines.sources import pool_ids
from omnara.engine.machines.targets import LIVE_STATES, choose, connection_of
from omnara.engine.tool_tx import Ahead, Done, Outcome, Transaction, TransactionalTool
from omnara.ids import IdKind, decode, encode
from omnara.tools.protocol import ToolResult, failed, succeeded

__all__ = ["TOOLS"]

DELETED_BY_AGENT: Final = "deleted_by_agent"


async def list_machines(tx: Transaction) -> Outcome:
    """List the agent's machines, and the pools that it may make more from."""
    machines = await bindings.bound_machines(tx.connection, tx.agent_id)
    pools = await _pools(tx)
    counts = {pool.id: sum(machine.pool_id == pool.id for machine in machines) for pool in pools}
    shown_pools = [
        {
            "pool": pool.name,
            "pool_id": encode(IdKind.MACHINE_POOL, pool.id),
            "description": pool.description,
            "machines": counts[pool.id],
            "max_machines": _source(tx.definition, pool.id).max_machines,
        }
        for pool in pools
    ]
    return succeeded(StructuredDataBlock({"machines": [_short(m) for m in machines], "pools": shown_pools}))


async def inspect_machine(tx: Transaction) -> Outcome:
    """Show one machine, also one that is being deleted or that the project may no longer use."""
    machines = await bindings.bound_machines(tx.connection, tx.agent_id)
    named = "machine_ref" in tx.input or "machine_id" in tx.input
    names = {name for key in ("machine_ref", "machine_id") if (name := tx.input.get(key)) is not None}
    found: BoundMachine | ToolResult | None = None
    if named or len(machines) == 1:
        found = next((m for m in machines if names <= {m.machine_ref, encode(IdKind.MACHINE, m.machine_id)}), None)
    found = found or choose(machines, tx.input)
    if isinstance(found, ToolResult):
        return found
    return succeeded(StructuredDataBlock(_long(found)))


async def lock_for_create(ahead: Ahead) -> None:
    """Lock the pools of the config, of which the call means one."""
    await bindings.lock_pools(ahead.connection, pool_ids(ahead.definition.machine_sources))


async def create_machine(tx: Transaction) -> Outcome:
    """Admit one machine. Source: engine.md §7; machines.md §12 (caps)."""
    chosen = _choose_pool(await _pools(tx), tx.input.get("pool"))
    if isinstance(chosen, ToolResult):
        return chosen
    agent = await agents.locate_agent(tx.connection, tx.agent_id)
    assert agent is not None, "agents are never deleted"
    source = _source(tx.definition, chosen.id)
    try:
        made = await add_pool_machine(tx.connection, Owner(agent.org_id, agent.project_id, agent.id), source)
    except (MachineCapacity, PoolUnavailable) as error:
        return failed(f"No machine was made: {error.detail}.", "machine_capacity_reached", pool=chosen.name)
    value = {
        "machine_ref": made.machine_ref,
        "machine_id": encode(IdKind.MACHINE, made.machine_id),
        "pool": chosen.name,
        "state": "provisioning",
    }
    return Done(succeeded(StructuredDataBlock(value)), (made.machine_id,))


async def lock_for_delete(ahead: Ahead) -> UUID | None:
    """Lock the machine that the call means, if it can be told; the agent is locked after it."""
    found = choose(await bindings.bound_machines(ahead.connection, ahead.agent_id), ahead.input)
    if isinstance(found, ToolResult):
        return None
    await bindings.lock_machines(ahead.connection, [found.machine_id])
    return found.machine_id


async def delete_machine(tx: Transaction) -> Outcome:
    """Give up a machine of a pool: its processes end, its binding is released, and it will be deleted."""
    found = choose(await bindings.bound_machines(tx.connection, tx.agent_id), tx.input)
    if isinstance(found, ToolResult):
        return found
    if found.binding_kind != "pool":
        return failed("This machine does not come from a pool: it is not yours to delete.", "machine_not_deletable")
    refused = await invalidated(tx, found)
    if refused is not None:
        return refused
    if found.machine_id != tx.ahead:
        return failed("Your machines have just changed. Try again.", "machine_selection_changed", retryable=True)
    told = await release(tx.connection, tx.appending, [found], DELETED_BY_AGENT)
    public_id = encode(IdKind.MACHINE, found.machine_id)
    value = {"machine_ref": found.machine_ref, "machine_id": public_id, "state": "deleting"}
    return Done(succeeded(StructuredDataBlock(value)), tuple(told))


async def _pools(tx: Transaction) -> list[PoolName]:
    ids = pool_ids(tx.definition.machine_sources)
    return await bindings.pool_names(tx.connection, tx.project_id, ids) if ids else []


def _choose_pool(pools: Sequence[PoolName], wanted: str | None) -> PoolName | ToolResult:
    names = [pool.name for pool in pools]
    if wanted is None:
        if len(pools) == 1:
            return pools[0]
        if pools:
            return failed("Say which pool: there are several.", "machine_pool_selection_required", pools=names)
    for pool in pools:
        if wanted in (pool.name, encode(IdKind.MACHINE_POOL, pool.id)):
            return pool
    return failed("There is no such pool for you.", "machine_pool_unavailable", pools=names)


def _source(definition: Definition, pool_id: UUID) -> PoolSource:
    sources = (source for source in definition.machine_sources if isinstance(source, PoolSource))
    return next(source for source in sources if decode(IdKind.MACHINE_POOL, source.pool_id) == pool_id)


def _short(machine: BoundMachine) -> dict[str, Any]:
    state = machine.lifecycle_state
    return {
        "machine_ref": machine.machine_ref,
        "machine_id": encode(IdKind.MACHINE, machine.machine_id),
        "name": machine.display_name,
        "description": machine.description or machine.machine_description,
        "kind": machine.binding_kind,
        "state": state if machine.granted or state not in LIVE_STATES else "not_granted",
        "connection": connection_of(machine),
        "cwd": working_directory("", machine.cwd, machine.machine_cwd),
        "platform": machine.observed_platform,
    }


def _long(machine: BoundMachine) -> dict[str, Any]:
    report = machine.failure_report
    return _short(machine) | {
        "provider": machine.provider,
        "cpu": machine.cpu,
        "memory_mb": machine.memory_mb,
        "reason": machine.reason_code,
        "reason_message": machine.reason_message,
        "offline_for_s": None if connection_of(machine) != "offline" else round(machine.offline_s or 0),
        "failure_report": None if report is None else msgspec.json.decode(report),
        "created_at": machine.created_at.isoformat(),
    }


TOOLS: Final = {
    "list_machines": TransactionalTool(list_machines),
    "inspect_machine": TransactionalTool(inspect_machine),
    "create_machine": TransactionalTool(create_machine, lock_for_create),
    "delete_machine": TransactionalTool(delete_machine, lock_for_delete),
}
