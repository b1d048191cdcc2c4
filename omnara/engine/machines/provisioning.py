"""A pool machine's place: claimed, made, replaced, given up or removed. The provider is called by others, outside.

A claim is the machine's lifecycle version and a token; each ending names both, so whoever comes late changes nothing
and is told. What a provider made is written down even when it failed after that.
Source: machines.md §12, §13, §14 rows 21 to 24.
"""

from __future__ import annotations

import base64
import secrets
import uuid
from collections.abc import Sequence
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from omnara.access.tokens import BearerToken
from omnara.db import provisioning as db
from omnara.db import runtimes
from omnara.db.connection import Connection
from omnara.db.provisioning import PlacedMachine
from omnara.engine.deps import Deps
from omnara.engine.machines import daemon_tokens
from omnara.engine.machines.closing import close_machine
from omnara.engine.machines.closing_down import end_pool_machine
from omnara.engine.machines.completing import Told
from omnara.errors import Gone
from omnara.ids import IdKind, encode
from omnara.machines.providers.protocol import Credential, DaemonAccess, MachineSpec, Resource

__all__ = ["Times", "allocation_name", "claim_due", "completed", "failed", "replace", "spec_of"]

FAILED: Final = "provision_failed"
UNAVAILABLE: Final = "provider_unavailable"
"""Also named by the statement that finds what waits for such machines."""
GAVE_UP: Final = "startup_or_daemon_bootstrap_failed"
"""Source: machines.md §4 (timers)."""
REPLACED: Final = "machine_replaced"
MAX_MESSAGE: Final = 1000


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, that tests shrink. Source: machines.md §12."""

    claim_s: float = 180.0
    retries_s: tuple[float, ...] = (10.0, 30.0, 90.0)
    """After the first, second and third failed attempt; after the third the machine is given up instead."""
    attempts: int = 3
    removals_s: tuple[float, ...] = (60.0, 300.0, 1800.0, 86_400.0)
    unavailable_s: float = 5.0
    """How soon a place is asked again that could not be asked."""
    wake_s: float = 120.0
    wake_pause_s: float = 1.0
    look_s: float = 1.0
    observe_s: float = 15.0
    """Between two looks for containers that ended while nobody spoke to them; who speaks to one knows at once."""
    upkeep_s: float = 60.0
    minute_s: float = 60.0
    """The unit of `delete_after_idle_minutes`."""
    daemon_s: float = 10.0
    """How long a daemon of a new place may take before anybody looks after it."""
    startup_s: float = 300.0
    """A machine to which no daemon came for so long is given up. Source: machines.md §4 (timers)."""
    stuck_s: float = 90.0
    """A machine that runs and cannot be spoken to for so long is replaced."""


def allocation_name(installation_id: UUID, machine_id: UUID) -> str:
    """Return the name of a machine's place, the same for ever and in no other installation. Source: machines.md §12."""
    hashed = uuid.uuid5(installation_id, machine_id.hex).bytes
    return "omnara-mch-" + base64.b32encode(hashed).decode().rstrip("=").lower()


def spec_of(
    installation_id: UUID, machine: PlacedMachine, credential: Credential | None, daemon: DaemonAccess | None
) -> MachineSpec:
    """Return what a provider has to know. The machine's environment is not in it: each command brings its own."""
    return MachineSpec(
        machine_id=encode(IdKind.MACHINE, machine.id),
        installation_id=str(installation_id),
        allocation_name=allocation_name(installation_id, machine.id),
        generation=max(1, machine.generation),
        config=_object(machine.config),
        options=_object(machine.options),
        cpu=machine.cpu,
        memory_mb=machine.memory_mb,
        cwd=machine.cwd,
        credential=credential,
        daemon=daemon,
    )


async def claim_due(
    connection: Connection, worker_id: UUID, reach: Sequence[tuple[str, str]], times: Times, limit: int
) -> list[PlacedMachine]:
    """Claim machines to make or to remove, in the places that this replica reaches. Commits by itself."""
    token = secrets.randbits(63)
    return await db.claim_due(connection, worker_id, token, reach, limit=limit, lease_s=times.claim_s)


async def hold(deps: Deps, claimed: PlacedMachine, times: Times) -> bool:
    """Keep a claim for another lease; False when it is not ours any more. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        return await db.hold_claim(connection, claimed, times.claim_s)


async def begin(deps: Deps, claimed: PlacedMachine, times: Times, *, with_token: bool) -> BearerToken | None:
    """Hold a claim for the call that makes the machine; with the token that its daemon is to have, in one commit.

    The token is good if the attempt is the machine's still, and no attempt is without one. Own transaction. Raises Gone
    when the claim is not ours any more, Unavailable.
    """

    async def work(connection: Connection) -> BearerToken | None:
        if not await db.hold_claim(connection, claimed, times.claim_s):
            raise Gone("the machine went another way")
        if not with_token:
            return None
        return await daemon_tokens.mint(connection, claimed.org_id, claimed.id, f"generation {claimed.generation}")

    return await deps.db.run(work)


Became = Literal["active", "unwanted", "moved_on"]
"""What became of a machine by an attempt.

`unwanted`: it is deleted, or somebody else is removing it and may have looked already, so what this attempt made is to
be removed at once: nobody else knows of it, and no machine comes back from there. `moved_on`: what was made is to be
left alone. The machine's removal needs the claim that was given back here, or another attempt follows, or somebody else
has made it active, with this very place."""


async def completed(deps: Deps, claimed: PlacedMachine, resource: Resource) -> Became:
    """Make a machine active whose place was made, and say so; or say where it went meanwhile.

    Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> Became:
        metadata = msgspec.json.encode(dict(resource.details)).decode()
        done = await db.activate(connection, claimed, resource.resource_id, resource.sandbox_url, metadata)
        return "active" if done else await _left(connection, claimed)

    done = await deps.db.run(work)
    deps.hints.machines((claimed.id,))
    return done


async def failed(deps: Deps, claimed: PlacedMachine, message: str, resource: Resource | None, times: Times) -> Became:
    """Note that an attempt failed, with what it made; the last one gives the machine up, which ends what waits for it.

    Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> tuple[Told, Became]:
        if resource is not None:
            await db.note_resource(connection, claimed, resource.resource_id, resource.sandbox_url)
        retry_s = times.retries_s[min(claimed.provision_attempts, len(times.retries_s)) - 1]
        if not await db.provision_failed(connection, claimed, FAILED, message[:MAX_MESSAGE], retry_s):
            return Told(machines={claimed.id}), await _left(connection, claimed)
        if claimed.provision_attempts < times.attempts:
            return Told(), "moved_on"
        return await end_pool_machine(connection, claimed.id, GAVE_UP, message[:MAX_MESSAGE]), "moved_on"

    told, became = await deps.db.run(work)
    told.tell(deps)
    return became


async def put_off(deps: Deps, claimed: PlacedMachine, message: str, times: Times) -> Became:
    """Give a claim back because the place could not be asked: that was no attempt.

    Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> Became:
        done = await db.put_off(connection, claimed, times.unavailable_s, UNAVAILABLE, message[:MAX_MESSAGE])
        return "moved_on" if done else await _left(connection, claimed)

    return await deps.db.run(work)


async def give_back(deps: Deps, claimed: PlacedMachine) -> None:
    """Give back a claim under which nothing was made. Own transaction. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        await db.release(connection, claimed)
    deps.hints.machines((claimed.id,))


async def _left(connection: Connection, claimed: PlacedMachine) -> Became:
    """Give back what may be left of a claim, and say where the machine went without it."""
    ours = await db.release(connection, claimed)
    found = await db.lock_lifecycle(connection, claimed.id)
    if found is None or found.state == "deleted":
        return "unwanted"
    return "moved_on" if ours or found.state not in ("deleting", "delete_failed") else "unwanted"


async def removed(deps: Deps, claimed: PlacedMachine) -> bool:
    """Note that nothing is left of a machine that was to be deleted, and end what nobody will report any more.

    False when the claim is not ours any more. Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> Told | None:
        return await close_machine(connection, claimed.id) if await db.removed(connection, claimed) else None

    told = await deps.db.run(work)
    if told is not None:
        told.tell(deps)
    return told is not None


async def removal_failed(deps: Deps, claimed: PlacedMachine, message: str, times: Times) -> None:
    """Note that a machine could not be removed; it is tried again, for ever, ever more rarely. Raises Unavailable."""
    wait_s = times.removals_s[min(max(1, claimed.delete_attempts), len(times.removals_s)) - 1]
    async with deps.db.acquire() as connection:
        await db.delete_failed(connection, claimed, message[:MAX_MESSAGE], wait_s)


async def replace(deps: Deps, machine: PlacedMachine, message: str) -> bool:
    """Let a new place be made for an active machine that lost its own; False when it went another way meanwhile.

    Another generation, that is, or another driver: what one could not speak to may well answer the next one. Its
    runtime ends, so what was granted is settled when the next driver registers, and what was not goes to the new
    place. Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> bool:
        if await db.lock_lifecycle(connection, machine.id) is None:
            return False
        if not await db.replace(connection, machine, message[:MAX_MESSAGE]):
            return False
        await runtimes.end_active(connection, machine.id, REPLACED)
        # A daemon of the lost place that is not quite gone must not come before the new one, whose token it would end.
        await runtimes.revoke_other_tokens(connection, machine.id, None, REPLACED)
        return True

    done = await deps.db.run(work)
    if done:
        deps.hints.machines((machine.id,))
    return done


async def give_up(deps: Deps, machine: PlacedMachine, message: str, times: Times) -> bool:
    """Remove an active machine to which no daemon came, and end what waits for it; False when it went another way.

    That none came is asked again under the lock: one that comes meanwhile changes nothing about the machine's life.

    Own transaction. Raises Unavailable.
    """

    async def work(connection: Connection) -> Told:
        found = await db.lock_lifecycle(connection, machine.id)
        if found is None or (found.state, found.version) != ("active", machine.lifecycle_version):
            return Told()
        silent = await db.silent_daemon(connection, machine.id)
        if silent is None or not silent.never or silent.made_s <= times.startup_s:
            return Told()
        return await end_pool_machine(connection, machine.id, GAVE_UP, message[:MAX_MESSAGE])

    told = await deps.db.run(work)
    told.tell(deps)
    return bool(told.machines)


def _object(text: str) -> dict[str, Any]:
    value: dict[str, Any] = msgspec.json.decode(text)
    return value
