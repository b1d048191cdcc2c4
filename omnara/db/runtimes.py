"""Runtimes: the daemon processes of machines, their channels and leases, and what they say about their machines."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("runtimes")


class TokenHolder(msgspec.Struct, frozen=True):
    """Whom a daemon's token stands for. `stale`: its last use is to be noted."""

    token_id: UUID
    machine_id: UUID
    org_id: UUID
    stale: bool


class LockedMachine(msgspec.Struct, frozen=True):
    """A machine that this transaction has locked."""

    id: UUID
    org_id: UUID
    source_kind: str
    lifecycle_state: str
    current_runtime_id: UUID | None
    sandbox_url: str | None
    claim_token: int | None
    generation: int


class KnownRuntime(msgspec.Struct, frozen=True):
    """The runtime of a daemon process that registered before."""

    id: UUID
    state: str
    state_reason_code: str
    daemon_version: str


class RuntimeRow(msgspec.Struct, frozen=True):
    """A runtime as the daemon's routes show it. `capacity` is JSON text."""

    id: UUID
    org_id: UUID
    machine_id: UUID
    daemon_instance_id: UUID
    daemon_version: str
    capacity: str
    state: str
    state_reason_code: str
    state_reason_message: str
    created_at: datetime
    last_seen_at: datetime
    lease_expires_at: datetime
    ended_at: datetime | None
    session_id: UUID | None
    worker_id: UUID | None


class NewRuntimeRow(msgspec.Struct, frozen=True):
    """A runtime to insert. `capacity` is JSON text, `lease_s` seconds."""

    id: UUID
    org_id: UUID
    machine_id: UUID
    token_id: UUID | None
    daemon_instance_id: UUID
    daemon_version: str
    capacity: str
    lease_s: float


async def token_holder(connection: Connection, token_hash: str) -> TokenHolder | None:
    """Return whom a daemon's token stands for."""
    row = await connection.fetchrow(_SQL["daemon_token"], token_hash)
    return None if row is None else TokenHolder(*row)


async def touch_token(connection: Connection, token_id: UUID) -> None:
    """Note that a daemon's token was used."""
    await connection.execute(_SQL["touch_daemon_token"], token_id)


async def token_is_good(connection: Connection, token_id: UUID, machine_id: UUID) -> bool:
    """Whether a token of a locked machine may be used."""
    return bool(await connection.fetchval(_SQL["token_is_good"], token_id, machine_id))


async def revoke_other_tokens(connection: Connection, machine_id: UUID, kept: UUID | None, reason: str) -> None:
    """Revoke every token of a locked machine but `kept`."""
    await connection.execute(_SQL["revoke_other_tokens"], machine_id, kept, reason)


async def lock_machine(connection: Connection, machine_id: UUID) -> LockedMachine | None:
    """Lock a machine until the transaction ends; None for an unknown or deleted one."""
    row = await connection.fetchrow(_SQL["lock_machine"], machine_id)
    return None if row is None else LockedMachine(*row)


async def runtime_of_instance(connection: Connection, machine_id: UUID, instance_id: UUID) -> KnownRuntime | None:
    """Return the runtime of a daemon process of a locked machine."""
    row = await connection.fetchrow(_SQL["runtime_of_instance"], machine_id, instance_id)
    return None if row is None else KnownRuntime(*row)


async def find(connection: Connection, runtime_id: UUID) -> tuple[RuntimeRow, bool] | None:
    """Return a runtime and whether it is its machine's current one."""
    row = await connection.fetchrow(_SQL["runtime_at"], runtime_id)
    return None if row is None else (RuntimeRow(*tuple(row)[:-1]), bool(row["current"]))


async def end_active(
    connection: Connection, machine_id: UUID, reason: str, kept: UUID | None = None
) -> tuple[UUID, UUID | None] | None:
    """End the active runtime of a locked machine unless it is `kept`; return it and its token."""
    row = await connection.fetchrow(_SQL["end_runtimes"], machine_id, kept, reason)
    return None if row is None else (row[0], row[1])


async def insert(connection: Connection, new: NewRuntimeRow) -> None:
    """Insert the runtime of a new daemon process of a locked machine, whose other ones have ended."""
    await connection.execute(_SQL["insert_runtime"], *msgspec.structs.astuple(new))


async def revive(
    connection: Connection, runtime_id: UUID, token_id: UUID | None, capacity: str, lease_s: float
) -> None:
    """Make a runtime active again, without a channel. The machine is locked."""
    await connection.execute(_SQL["revive_runtime"], runtime_id, token_id, capacity, lease_s)


async def registered(connection: Connection, machine_id: UUID, runtime_id: UUID, platform: str | None) -> None:
    """Make a runtime the current one of a locked machine and clear the marks of sleep and failure."""
    await connection.execute(_SQL["machine_registered"], machine_id, runtime_id, platform)


async def open_channel(
    connection: Connection, machine_id: UUID, runtime_id: UUID, session_id: UUID, worker_id: UUID
) -> RuntimeRow | None:
    """Make a session the channel of a machine's current runtime; None when it is not that."""
    row = await connection.fetchrow(_SQL["open_channel"], machine_id, runtime_id, session_id, worker_id)
    return None if row is None else RuntimeRow(*row)


async def close_channel(connection: Connection, runtime_id: UUID, session_id: UUID) -> bool:
    """Note that a channel was lost; False when another one had taken its place."""
    return await connection.fetchval(_SQL["close_channel"], runtime_id, session_id) is not None


async def beat(
    connection: Connection, runtime_id: UUID, session_id: UUID, instance_id: UUID, lease_s: float, platform: str | None
) -> UUID | None:
    """Renew a lease and keep a new platform; return the machine, None when the channel may not."""
    row = await connection.fetchrow(_SQL["beat"], runtime_id, session_id, instance_id, lease_s, platform)
    if row is None:
        return None
    machine_id: UUID = row[0]
    if row["moved"]:
        await connection.execute(_SQL["set_platform"], machine_id, platform)
    return machine_id


async def fall_asleep(connection: Connection, machine_id: UUID) -> None:
    """Mark a locked machine as sleeping."""
    await connection.execute(_SQL["fall_asleep"], machine_id)


async def has_pending_work(connection: Connection, machine_id: UUID) -> bool:
    """Whether anything on a machine is queued, running or not yet reported."""
    return bool(await connection.fetchval(_SQL["has_pending_work"], machine_id))


async def keep_failure(connection: Connection, machine_id: UUID, report: str) -> None:
    """Keep the last failure report (JSON text) of a machine."""
    await connection.execute(_SQL["keep_failure"], machine_id, report)


async def touch_activity(connection: Connection, machine_id: UUID) -> None:
    """Note that something began or ended on a machine, to half a minute."""
    await connection.execute(_SQL["touch_activity"], machine_id)


async def end_lapsed(connection: Connection, after_s: float, limit: int) -> list[tuple[UUID, UUID]]:
    """End runtimes whose lease ran out `after_s` seconds ago; return (runtime, machine). Waits for no lock."""
    return [(row[0], row[1]) for row in await connection.fetch(_SQL["end_lapsed_runtimes"], after_s, limit)]


async def active_token(connection: Connection, machine_id: UUID) -> UUID | None:
    """Return the token with which the active runtime of a locked machine registered."""
    found: UUID | None = await connection.fetchval(_SQL["active_token"], machine_id)
    return found
