"""Which machines an agent has: attached at launch, changed with its config, released when it is archived.

A machine that somebody connected is only detached; one of a pool exists because of its agent, and is deleted with the
binding. Order of locks: pools and machines before the agent, so callers lock with `lock_for_change` first.
Source: engine.md §4 (launch, config change), §8 (archive); machines.md §8, §12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.roles import ProjectScope
from omnara.db import bindings as db
from omnara.db.bindings import BoundMachine
from omnara.db.connection import Connection
from omnara.domain.config import MachineSource, PoolSource, Source
from omnara.engine.appending import Appending
from omnara.engine.machines.admission import Owner, add_pool_machine, attach, new_ref
from omnara.engine.machines.closing import close_binding
from omnara.engine.machines.sources import SANDBOX, check_sources, pool_ids, secret_uuids, source_key
from omnara.errors import InvalidRequest
from omnara.ids import IdKind, decode

__all__ = ["add_at_launch", "lock_for_change", "lock_for_release", "reconcile", "release", "release_all"]

CONFIG_CHANGED: Final = "machine_source_removed"
ARCHIVED: Final = "agent_archived"


async def add_at_launch(
    connection: Connection, project: ProjectScope, agent_id: UUID, sources: Sequence[Source]
) -> set[UUID]:
    """Give a new agent its machines; returns those to be provisioned, to hint at after the commit.

    In the transaction of the launch. Raises InvalidRequest (a grant is gone), Conflict (no room).
    """
    if not sources:
        return set()
    await _lock_sources(connection, sources)  # nobody else can see this agent yet, so nobody waits for it
    await check_sources(connection, project, sources)
    owner = Owner(project.org_id, project.project_id, agent_id)
    told: set[UUID] = set()
    for source in sources:
        told |= await _fill(connection, owner, source, 0)
    return told


async def lock_for_change(connection: Connection, agent_id: UUID, sources: Sequence[Source]) -> None:
    """Lock what a change of an agent's machines to these sources may touch. Before the agent is locked."""
    await _lock_sources(connection, sources)
    await lock_for_release(connection, agent_id)


async def lock_for_release(connection: Connection, agent_id: UUID) -> None:
    """Lock the pool machines of an agent, which go with it. Before the agent is locked.

    It may get another one between this and its own lock; `release` sees to that.
    """
    found = [m.machine_id for m in await db.bound_machines(connection, agent_id) if m.binding_kind == "pool"]
    if found:
        await db.lock_machines(connection, found)


async def reconcile(
    connection: Connection, project: ProjectScope, appending: Appending, sources: Sequence[Source]
) -> set[UUID]:
    """Give a locked agent the machines of another config; returns the machines to hint at after the commit.

    What the config no longer names is released, with its work; results of calls that waited for it go to `appending`.
    Machines that a tool made from a pool stay as long as the pool is named. Raises Conflict (no room), InvalidRequest
    (a machine was deleted since the sources were locked).
    """
    agent_id = appending.hot.agent_id
    bound = await db.bound_machines(connection, agent_id)
    wanted = {source_key(source): source for source in sources}
    gone = [m for m in bound if m.source_key not in wanted and not (m.source_key == SANDBOX and not sources)]
    told = await release(connection, appending, gone, CONFIG_CHANGED)
    kept = [(machine, wanted[machine.source_key]) for machine in bound if machine.source_key in wanted]
    await _change(connection, agent_id, kept)
    owner = Owner(project.org_id, project.project_id, agent_id)
    for key, source in wanted.items():
        told |= await _fill(connection, owner, source, sum(machine.source_key == key for machine, _ in kept))
    return told


async def release(
    connection: Connection, appending: Appending, machines: Sequence[BoundMachine], reason: str
) -> set[UUID]:
    """Take machines from a locked agent, with all that it has on them; those of pools will be deleted.

    Returns the machines to hint at after the commit. Results of calls that waited go to `appending`. A machine that the
    agent got after `lock_for_release` looked is locked out of order, so never waited for: when somebody holds it, this
    raises DatabaseUnavailable with a cause after which the transaction is to be run again.
    """
    told: set[UUID] = set()
    pooled = [machine.machine_id for machine in machines if machine.binding_kind == "pool"]
    if pooled:
        await db.lock_machines(connection, pooled, at_once=True)
    for machine in machines:
        told |= await close_binding(connection, appending, machine.binding_id)
    if machines:
        await db.release_bindings(connection, [machine.binding_id for machine in machines])
    return told | set(await db.delete_machines(connection, pooled, reason)) if pooled else told


async def release_all(connection: Connection, appending: Appending, reason: str = ARCHIVED) -> set[UUID]:
    """Take every machine from a locked agent, as `release` does."""
    bound = await db.bound_machines(connection, appending.hot.agent_id)
    return await release(connection, appending, bound, reason)


async def _lock_sources(connection: Connection, sources: Sequence[Source]) -> None:
    """Pools against other admissions; machines against whoever deletes them, or takes them from the project."""
    if pools := pool_ids(sources):
        await db.lock_pools(connection, pools)
    if machines := [decode(IdKind.MACHINE, s.machine_id) for s in sources if isinstance(s, MachineSource)]:
        await db.share_machines(connection, machines)


async def _fill(connection: Connection, owner: Owner, source: Source, there: int) -> set[UUID]:
    """Attach what is missing of a source of which there are `there` machines."""
    if isinstance(source, MachineSource):
        machine_id = decode(IdKind.MACHINE, source.machine_id)
        if not there:
            if not await db.keep_machine(connection, machine_id):
                raise InvalidRequest(f"the machine {source.machine_id} is deleted")
            await attach(connection, owner, source, machine_id)
        return set()
    missing = range(there, source.initial_num_machines)
    return {(await add_pool_machine(connection, owner, source)).machine_id for _ in missing}


async def _change(connection: Connection, agent_id: UUID, kept: Sequence[tuple[BoundMachine, Source]]) -> None:
    """Write what the config says about machines that stay; two that exchange their names are first given others."""
    changed = [(machine, source, _ref(machine, source)) for machine, source in kept if not _is_same(machine, source)]
    for machine, source, ref in changed:
        if ref != machine.machine_ref:
            await _write(connection, machine, source, new_ref())
    for machine, source, ref in changed:
        if ref != machine.machine_ref:
            await db.free_ref(connection, agent_id, ref, new_ref())
        await _write(connection, machine, source, ref)


def _ref(machine: BoundMachine, source: Source) -> str:
    return source.ref or machine.machine_ref if isinstance(source, MachineSource) else machine.machine_ref


def _is_same(machine: BoundMachine, source: Source) -> bool:
    said = (source.description, source.cwd, dict(source.env_overlay), _secrets(source), _ref(machine, source))
    env, secret_env = msgspec.json.decode(machine.env_overlay), msgspec.json.decode(machine.secret_env_overlay)
    return said == (machine.description, machine.cwd, env, secret_env, machine.machine_ref)


def _secrets(source: MachineSource | PoolSource) -> dict[str, str | None]:
    found = secret_uuids(source.secret_env_overlay)
    return {name: None if value is None else str(value) for name, value in found.items()}


async def _write(connection: Connection, machine: BoundMachine, source: Source, ref: str) -> None:
    await db.change_binding(
        connection,
        machine.binding_id,
        machine_ref=ref,
        description=source.description,
        cwd=source.cwd,
        env_overlay=msgspec.json.encode(source.env_overlay).decode(),
        secret_env_overlay=msgspec.json.encode(_secrets(source)).decode(),
    )
