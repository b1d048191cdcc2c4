"""Pool machines on which nothing happens: removed after their idle minutes, asleep after their idle milliseconds.

Found without a lock, and looked at again under it, in the transaction that acts: a command that was queued meanwhile
keeps its machine. Source: machines.md §12 (idle deletion), §14 rows 19 and 22; §9 (sleep).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Literal
from uuid import UUID

from omnara import probes
from omnara.db import machines, processes, runtimes
from omnara.db import provisioning as db
from omnara.db.connection import Connection
from omnara.db.provisioning import PlacedMachine
from omnara.engine.deps import Deps
from omnara.engine.machines.closing_down import end_pool_machine
from omnara.engine.machines.completing import Told
from omnara.engine.machines.provisioning import Times

__all__ = ["claim_wakes", "fall_asleep", "found_asleep", "remove_idle", "sleepy", "wake_failed", "woken"]

IDLE: Final = "machine_idle"
ASLEEP: Final = "machine_asleep"


async def remove_idle(deps: Deps, times: Times) -> int:
    """Hand machines that were idle for their time to the provisioner, which removes them; return how many.

    One transaction for each. Raises Unavailable.
    """
    async with deps.db.acquire() as connection:
        found = await db.idle(connection, times.minute_s)
    count = 0
    for machine_id, org_id in found:
        told = await deps.db.run(partial(_remove, org_id, machine_id, times))
        count += bool(told.machines)
        told.tell(deps)
    return count


async def _remove(org_id: UUID, machine_id: UUID, times: Times, connection: Connection) -> Told:
    if not await machines.lock(connection, org_id, machine_id):
        return Told()
    # Whoever queues a command has its agent locked: it is seen here, or finds the machine going.
    await processes.lock_agents(connection, {agent for _, agent in await machines.bindings(connection, machine_id)})
    if not await db.idle(connection, times.minute_s, machine_id):
        probes.hit("idle_machine_kept", machine_id=machine_id)
        return Told()
    return await end_pool_machine(connection, machine_id, IDLE)


async def sleepy(deps: Deps, providers: Sequence[str]) -> list[UUID]:
    """Return machines that may be put to sleep now. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        return await db.sleepy(connection, providers)


class _Awake(Exception):
    """Something is to be done on a machine that was to sleep."""


async def fall_asleep(deps: Deps, machine_id: UUID, providers: Sequence[str]) -> PlacedMachine | None:
    """End a machine's runtime and mark it as asleep, unless something is to be done on it; what its place is.

    The runtime ends before the look, so nothing is granted after it. After the commit nobody drives the machine, and
    the caller suspends it. Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> PlacedMachine | None:
        if await db.lock_lifecycle(connection, machine_id) is None:
            return None
        await runtimes.end_active(connection, machine_id, ASLEEP)
        if not await db.sleepy(connection, providers, machine_id):
            raise _Awake  # and its runtime goes on
        await db.fall_asleep(connection, machine_id)
        return await db.machine_at(connection, machine_id)

    try:
        return await deps.db.run(work)
    except _Awake:
        return None


async def found_asleep(deps: Deps, machine: PlacedMachine) -> Literal["asleep", "needed", "moved_on"]:
    """Mark a machine as asleep that its place has suspended, so that what comes to be done on it wakes it.

    `needed`: something is to be done already. `moved_on`: its daemon is back, or somebody else saw to the machine. Own
    transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> Literal["asleep", "moved_on"]:
        found = await db.lock_lifecycle(connection, machine.id)
        if found is None or (found.state, found.version) != ("active", machine.lifecycle_version):
            return "moved_on"
        if await db.silent_daemon(connection, machine.id) is None:
            return "moved_on"
        await runtimes.end_active(connection, machine.id, ASLEEP)
        if await runtimes.has_pending_work(connection, machine.id):
            raise _Awake
        return "asleep" if await db.fall_asleep(connection, machine.id) else "moved_on"

    try:
        return await deps.db.run(work)
    except _Awake:
        return "needed"


async def claim_wakes(connection: Connection, reach: Sequence[tuple[str, str]], times: Times) -> list[PlacedMachine]:
    """Take sleeping machines that have something to do: ours to wake for two minutes. Commits by itself."""
    return await db.claim_wakes(connection, reach, times.wake_s, times.wake_pause_s)


async def woken(deps: Deps, machine: PlacedMachine) -> None:
    """Say that a machine is awake: whoever is free drives it. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        await db.woken(connection, machine)
    deps.hints.machines((machine.id,))


async def wake_failed(deps: Deps, machine: PlacedMachine) -> None:
    """End an attempt to wake a machine, so that what waits for it gives up in its time. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        await db.wake_failed(connection, machine)
