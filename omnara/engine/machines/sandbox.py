"""A machine for an agent that names none: made at its first command, from a pool that this server keeps by itself.

So an agent of the flat API gets a container by listing `run_command` among its tools. Source: DESIGN §1 (flat routes);
features.md (sandbox).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.db import agents, bindings
from omnara.db.agents import AgentRef
from omnara.db.bindings import BoundMachine
from omnara.domain.config import PoolSource
from omnara.engine.machines.admission import MachineCapacity, Owner, PoolUnavailable, add_pool_machine
from omnara.engine.machines.sources import SANDBOX
from omnara.engine.machines.targets import usable
from omnara.engine.tool_tx import Ahead, Transaction
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.protocol import ToolResult, failed

POOL_NAME: Final = "sandboxes"
"""With the provider's name behind it, so that another provider gets another pool."""
MAX_SANDBOXES: Final = 1000
"""Of one organization."""


class SandboxPool(msgspec.Struct, frozen=True):
    """The locked pool, and the agent that asks."""

    pool_id: UUID
    agent: AgentRef


def needs_one(machines: Sequence[BoundMachine]) -> bool:
    """Whether an agent has nothing to run a command on, at most a sandbox that is being deleted."""
    return not any(usable(machine) or machine.source_key != SANDBOX for machine in machines)


async def lock_pool(ahead: Ahead) -> SandboxPool | None:
    """Make sure of the pool, and lock it, if the agent may need it; before the agent is locked."""
    provider = ahead.deps.settings.sandbox
    if provider == "off":
        return None
    if not needs_one(await bindings.bound_machines(ahead.connection, ahead.agent_id)):
        return None
    agent = await agents.locate_agent(ahead.connection, ahead.agent_id)
    assert agent is not None, "agents are never deleted"
    name = f"{POOL_NAME}-{provider}"
    found = await bindings.own_pool(ahead.connection, agent.org_id, name)
    if found is None:
        await bindings.insert_own_pool(
            ahead.connection,
            new_uuid(),
            agent.org_id,
            name=name,
            description="Sandboxes of agents that name no machine.",
            provider=provider,
            most=MAX_SANDBOXES,
        )
        found = await bindings.own_pool(ahead.connection, agent.org_id, name)
    if found is None:
        return None  # somebody's own pool has the name
    await bindings.grant_own_pool(ahead.connection, new_uuid(), agent.org_id, agent.project_id, found[0])
    await bindings.lock_pools(ahead.connection, [found[0]])
    return SandboxPool(found[0], agent)


async def add(tx: Transaction) -> ToolResult | None:
    """Give the agent its sandbox; a result says why there is none."""
    locked: SandboxPool = tx.ahead
    owner = Owner(locked.agent.org_id, locked.agent.project_id, locked.agent.id)
    # One that is being deleted still counts.
    source = PoolSource(pool_id=encode(IdKind.MACHINE_POOL, locked.pool_id), max_machines=MAX_SANDBOXES)
    try:
        await add_pool_machine(tx.connection, owner, source, SANDBOX)
    except (MachineCapacity, PoolUnavailable) as error:
        return failed(f"There is no sandbox to run this in: {error.detail}.", "machine_capacity_reached")
    return None
