"""Queries about pool machines whose place is made, replaced, put to sleep, woken or removed.

Each ending names the lifecycle version and the claim that it belongs to, so what comes late changes nothing.
Source: machines.md §12 (claims, attempts), §13 (replacement under the same machine).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.connection import Connection
from omnara.db.secrets import SealedRow
from omnara.db.sqlfiles import Queries

_SQL = Queries("provisioning")


class PlacedMachine(msgspec.Struct, frozen=True):
    """What there is to know of a pool machine's place, and the claim under which that was read. JSON as text."""

    id: UUID
    org_id: UUID
    provider: str
    lifecycle_state: str
    lifecycle_version: int
    claim_token: int
    resource_id: str | None
    resource_host: str | None
    generation: int
    cwd: str
    cpu: int | None
    memory_mb: int | None
    options: str
    config: str
    provision_attempts: int
    delete_attempts: int


class Lifecycle(msgspec.Struct, frozen=True):
    """Where a locked machine is in its life."""

    state: str
    version: int
    generation: int
    provision_attempts: int


class DrivenHere(msgspec.Struct, frozen=True):
    """An active machine that one worker drives."""

    id: UUID
    resource_id: str
    generation: int
    claim_token: int


class SilentDaemon(msgspec.Struct, frozen=True):
    """An active machine whose own daemon is away. `never`: none came to its place, which is `made_s` seconds old."""

    machine: PlacedMachine
    never: bool
    made_s: float


async def claim_due(
    connection: Connection,
    worker_id: UUID,
    claim_token: int,
    reach: Sequence[tuple[str, str]],
    *,
    limit: int,
    lease_s: float,
) -> list[PlacedMachine]:
    """Claim machines that are to be made or removed; each claim is an attempt. Commits by itself."""
    providers, hosts = _pairs(reach)
    rows = await connection.fetch(_SQL["claim_due_machines"], worker_id, claim_token, limit, lease_s, providers, hosts)
    return [_machine(row) for row in rows]


async def hold_claim(connection: Connection, claimed: PlacedMachine, lease_s: float) -> bool:
    """Extend a claim; False when it is not ours any more."""
    return await connection.fetchval(_SQL["hold_claim"], *_claim(claimed), lease_s) is not None


async def note_resource(
    connection: Connection, claimed: PlacedMachine, resource_id: str, sandbox_url: str | None
) -> bool:
    """Keep the id of what a provider made, also when it failed after that."""
    return await connection.fetchval(_SQL["note_resource"], *_claim(claimed), resource_id, sandbox_url) is not None


async def activate(
    connection: Connection, claimed: PlacedMachine, resource_id: str, sandbox_url: str | None, metadata: str
) -> bool:
    """Make a machine active and give the claim back; False when the machine went another way meanwhile."""
    values = (*_claim(claimed), resource_id, sandbox_url, metadata)
    return await connection.fetchval(_SQL["activate"], *values) is not None


async def provision_failed(
    connection: Connection, claimed: PlacedMachine, code: str, message: str, retry_s: float
) -> bool:
    """Note a failed attempt, and when the next may be."""
    values = (*_claim(claimed), code, message, retry_s)
    return await connection.fetchval(_SQL["provision_failed"], *values) is not None


async def put_off(connection: Connection, claimed: PlacedMachine, retry_s: float, code: str, message: str) -> bool:
    """Give a claim back for a while without counting an attempt, and note why; the first `code` says since when."""
    return await connection.fetchval(_SQL["put_off"], *_claim(claimed), retry_s, code, message) is not None


async def delete_failed(connection: Connection, claimed: PlacedMachine, message: str, retry_s: float) -> bool:
    """Note a failed removal, and when the next may be."""
    return await connection.fetchval(_SQL["delete_failed"], *_claim(claimed), message, retry_s) is not None


async def removed(connection: Connection, claimed: PlacedMachine) -> bool:
    """Note that nothing is left of a machine."""
    return await connection.fetchval(_SQL["removed"], *_claim(claimed)) is not None


async def release(connection: Connection, claimed: PlacedMachine) -> bool:
    """Give a claim back on a machine that went another way meanwhile, so that its removal need not wait.

    False when the claim is not ours any more.
    """
    return await connection.fetchval(_SQL["release"], claimed.id, claimed.claim_token) is not None


async def set_reason_message(connection: Connection, machine_id: UUID, message: str) -> None:
    """Say in words why a locked machine is where it is."""
    await connection.execute(_SQL["reason_message"], machine_id, message)


async def lock_lifecycle(connection: Connection, machine_id: UUID) -> Lifecycle | None:
    """Lock a machine and return where it is in its life."""
    row = await connection.fetchrow(_SQL["lifecycle"], machine_id)
    return None if row is None else Lifecycle(*row)


async def replace(connection: Connection, machine: PlacedMachine, message: str) -> bool:
    """Let the next generation of a machine's place be made; False when it is not as it was read, or not active."""
    values = (machine.id, machine.generation, message, machine.claim_token)
    return await connection.fetchval(_SQL["replace"], *values) is not None


async def driven_here(connection: Connection, worker_id: UUID, provider: str, host: str) -> list[DrivenHere]:
    """Return the machines of one place that a worker drives."""
    return [DrivenHere(*row) for row in await connection.fetch(_SQL["driven_here"], worker_id, provider, host)]


async def silent_daemons(
    connection: Connection, reach: Sequence[tuple[str, str]], after: UUID, daemon_s: float
) -> list[SilentDaemon]:
    """Return some machines of these places, after an id, whose own daemon is out of reach."""
    rows = await connection.fetch(_SQL["silent_daemons"], *_pairs(reach), after, None, daemon_s)
    return [_silent(row) for row in rows]


async def silent_daemon(connection: Connection, machine_id: UUID) -> SilentDaemon | None:
    """Return an active machine that nobody drives if its daemon is out of reach."""
    row = await connection.fetchrow(_SQL["silent_daemons"], [], [], UUID(int=0), machine_id, 0.0)
    return None if row is None else _silent(row)


async def live_machines(connection: Connection, machine_ids: Collection[UUID]) -> set[UUID]:
    """Return which of these machines are not deleted."""
    return {row[0] for row in await connection.fetch(_SQL["live_machines"], list(machine_ids))}


async def idle(connection: Connection, minute_s: float, machine_id: UUID | None = None) -> list[tuple[UUID, UUID]]:
    """Return (machine, organization) of those idle for as many of `minute_s` as theirs allows; of all, or this one."""
    return [(row[0], row[1]) for row in await connection.fetch(_SQL["idle_machines"], minute_s, machine_id)]


async def sleepy(connection: Connection, providers: Sequence[str], machine_id: UUID | None = None) -> list[UUID]:
    """Return the machines of these providers that may be put to sleep; of all, or this one."""
    return [row[0] for row in await connection.fetch(_SQL["sleepy_machines"], list(providers), machine_id)]


async def fall_asleep(connection: Connection, machine_id: UUID) -> bool:
    """Let a locked machine sleep."""
    return await connection.fetchval(_SQL["fall_asleep"], machine_id) is not None


async def is_awake(connection: Connection, machine: PlacedMachine) -> bool:
    """Whether a machine that was to sleep was woken meanwhile."""
    return bool(await connection.fetchval(_SQL["is_awake"], machine.id, machine.lifecycle_version))


async def claim_wakes(
    connection: Connection, reach: Sequence[tuple[str, str]], wake_s: float, pause_s: float
) -> list[PlacedMachine]:
    """Take sleeping machines that have something to do, for `wake_s` seconds; `pause_s` after each failed attempt.

    Commits by itself.
    """
    return [_machine(row) for row in await connection.fetch(_SQL["claim_wakes"], *_pairs(reach), wake_s, pause_s)]


async def woken(connection: Connection, machine: PlacedMachine) -> bool:
    """Note that a machine is awake."""
    return await connection.fetchval(_SQL["woken"], machine.id, machine.lifecycle_version) is not None


async def wake_failed(connection: Connection, machine: PlacedMachine) -> None:
    """Note that a machine could not be woken: what waits for it gives up in its time."""
    await connection.execute(_SQL["wake_failed"], machine.id, machine.lifecycle_version)


async def machine_at(connection: Connection, machine_id: UUID) -> PlacedMachine | None:
    """Return a pool machine, without a claim on it."""
    row = await connection.fetchrow(_SQL["machine_at"], machine_id)
    return None if row is None else _machine(row)


async def provider_secret(connection: Connection, machine_id: UUID) -> tuple[bool, SealedRow | None]:
    """Return whether a machine's pool names a secret for its provider, and that one's current value, sealed."""
    row = await connection.fetchrow(_SQL["provider_secret"], machine_id)
    if row is None:
        return False, None
    return True, None if row["version"] is None else SealedRow(*row)


def _silent(row: asyncpg.Record) -> SilentDaemon:
    values = dict(row)
    never, made_s = values.pop("never"), values.pop("made_s")
    return SilentDaemon(PlacedMachine(**values), never, made_s)


def _machine(row: asyncpg.Record) -> PlacedMachine:
    return PlacedMachine(**row)


def _claim(claimed: PlacedMachine) -> tuple[UUID, int, int]:
    return claimed.id, claimed.lifecycle_version, claimed.claim_token


def _pairs(reach: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    return [provider for provider, _ in reach], [host for _, host in reach]
