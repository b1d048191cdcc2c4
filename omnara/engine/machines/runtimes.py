"""The life of a runtime between registration and end: its channel, its heartbeats, its sleep, its troubles.

Online means an unexpired lease and an open channel. A dropped channel does not end a runtime: its machine goes on
working and comes back. Source: machines.md §2, §3 (heartbeat and lease), §8, §9.
"""

from __future__ import annotations

from typing import Final, Literal
from uuid import UUID

import msgspec

from omnara.db import runtimes as db
from omnara.db.connection import Connection
from omnara.db.runtimes import LockedMachine, RuntimeRow
from omnara.domain.text import clean_text
from omnara.engine.deps import Deps
from omnara.engine.machines.closing import close_machine_work
from omnara.engine.machines.completing import Told
from omnara.errors import Conflict, Gone, NotWakeCapable, PendingWork, RuntimeUnregistered
from omnara.machines.registration import Platform

LEASE_EXPIRED: Final = "daemon_lease_expired"
REPLACED: Final = "daemon_runtime_replaced"
ENDED: Final = "daemon_ended"
ASLEEP: Final = "machine_asleep"
INVALID: Final = "invalid_runtime"

MAX_FAILURE_BYTES: Final = 4096
"""The end of the output that a failure report keeps. Source: machines.md §8."""

FailureStage = Literal["startup_script", "daemon_install", "daemon_update", "daemon_uninstall", "daemon_uninstalled"]


class RuntimeEnded(msgspec.Struct, frozen=True):
    """The channel has no runtime any more, for a reason that the daemon acts upon.

    An empty `code`: another channel of the same runtime took this one's place; there is nothing to tell.
    `still_ours`: the runtime and this channel are as they were; only the lease has run out.
    """

    code: str
    still_ours: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon says of its troubles. `capture_status`: how the capture of the output ended, 0 for well."""

    stage: FailureStage
    exit_status: int | None = None
    capture_status: int | None = None
    daemon_version: str | None = None
    target_version: str | None = None
    text: bytes = b""


async def open_channel(deps: Deps, machine_id: UUID, runtime_id: UUID, session_id: UUID, worker_id: UUID) -> RuntimeRow:
    """Make a connection the machine's channel; what an older one still tries is refused. One statement.

    Raises RuntimeUnregistered when the runtime is not the machine's current, active one.
    """
    async with deps.db.acquire() as connection:
        row = await db.open_channel(connection, machine_id, runtime_id, session_id, worker_id)
    if row is None:
        raise RuntimeUnregistered
    return row


async def close_channel(deps: Deps, runtime_id: UUID, session_id: UUID) -> None:
    """Note that a channel was lost: from here on the machine is out of reach. One statement; may be repeated."""
    async with deps.db.acquire() as connection:
        await db.close_channel(connection, runtime_id, session_id)


async def beat(
    deps: Deps, runtime_id: UUID, session_id: UUID, instance_id: UUID, platform: Platform | None = None
) -> int | RuntimeEnded:
    """Extend a runtime's lease; return the milliseconds until the next beat is due. One statement.

    Also revives a lease that ran out, as long as nobody ended the runtime for it.
    """
    async with deps.db.acquire() as connection:
        machine_id = await db.beat(
            connection,
            runtime_id,
            session_id,
            instance_id,
            deps.settings.machine_lease_s,
            platform_text(platform),
        )
        if machine_id is None:
            return await why_ended(connection, runtime_id, session_id)
    return max(1, round(deps.settings.machine_heartbeat_s * 1000))


async def why_ended(connection: Connection, runtime_id: UUID, session_id: UUID) -> RuntimeEnded:
    """Return why a channel's statements are refused."""
    found = await db.find(connection, runtime_id)
    if found is None:
        return RuntimeEnded(INVALID)
    row, _ = found
    if row.state == "ended":
        return RuntimeEnded(row.state_reason_code or INVALID)
    ours = row.session_id == session_id
    return RuntimeEnded(INVALID if ours else "", ours)


async def end(deps: Deps, machine_id: UUID, runtime_id: UUID) -> RuntimeRow:
    """End a runtime because its daemon says so; what runs on the machine runs on. Own transaction.

    Raises RuntimeUnregistered when it is not the machine's active one.
    """

    async def work(connection: Connection) -> RuntimeRow:
        await _lock_active(connection, machine_id, runtime_id)
        await db.end_active(connection, machine_id, ENDED)
        return await _row(connection, runtime_id)

    return await deps.db.run(work)


async def sleep(deps: Deps, machine_id: UUID, runtime_id: UUID) -> RuntimeRow:
    """Let a machine sleep: its runtime ends, and whoever queues work has it woken. Own transaction.

    The runtime ends before anybody looks for work, so nothing is granted after that look; what is queued after it is
    found by the sweep that wakes machines. Raises RuntimeUnregistered, NotWakeCapable (nobody knows how to wake it),
    PendingWork.
    """

    async def work(connection: Connection) -> RuntimeRow:
        machine = await _lock_active(connection, machine_id, runtime_id)
        if not machine.sandbox_url:
            raise NotWakeCapable
        await db.end_active(connection, machine_id, ASLEEP)
        if await db.has_pending_work(connection, machine_id):
            raise PendingWork
        await db.fall_asleep(connection, machine_id)
        return await _row(connection, runtime_id)

    return await deps.db.run(work)


async def record_failure(deps: Deps, machine_id: UUID, report: Failure) -> None:
    """Keep the last trouble of a machine's daemon. Own transaction.

    `daemon_uninstalled` also ends all that was left on the machine. Raises Gone for an unknown machine, Conflict when a
    daemon is said to be uninstalled that is active.
    """
    text = msgspec.json.encode(_stored(report)).decode()

    async def work(connection: Connection) -> Told:
        machine = await db.lock_machine(connection, machine_id)
        if machine is None:
            raise Gone
        told = Told()
        if report.stage == "daemon_uninstalled":
            if machine.current_runtime_id is not None:
                found = await db.find(connection, machine.current_runtime_id)
                if found is not None and found[0].state == "active":
                    raise Conflict("the machine has an active runtime")
            told = await close_machine_work(connection, machine_id, report.stage)
        await db.keep_failure(connection, machine_id, text)
        return told

    (await deps.db.run(work)).tell(deps)


def platform_text(platform: Platform | None) -> str | None:
    """Return a platform as it is stored, `linux/amd64`; None when nothing is said of it."""
    if platform is None or not (platform.os or platform.arch):
        return None
    return clean_text(f"{platform.os}/{platform.arch}")[:200]


def _stored(report: Failure) -> dict[str, object]:
    tail = report.text[-MAX_FAILURE_BYTES:]
    value: dict[str, object] = {
        "stage": report.stage,
        "output_tail": clean_text(tail.decode("utf-8", "replace")),
        "output_truncated": len(report.text) > MAX_FAILURE_BYTES,
    }
    for name in ("exit_status", "daemon_version", "target_version"):
        if getattr(report, name) is not None:
            value[name] = getattr(report, name)
    return value


async def _lock_active(connection: Connection, machine_id: UUID, runtime_id: UUID) -> LockedMachine:
    machine = await db.lock_machine(connection, machine_id)
    if machine is None or machine.current_runtime_id != runtime_id:
        raise RuntimeUnregistered
    found = await db.find(connection, runtime_id)
    if found is None or found[0].state != "active":
        raise RuntimeUnregistered
    return machine


async def _row(connection: Connection, runtime_id: UUID) -> RuntimeRow:
    found = await db.find(connection, runtime_id)
    assert found is not None, "it was there in this transaction"
    return found[0]
