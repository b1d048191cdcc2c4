"""What the machine tools write: processes and their actions, under the lock of an agent whose claim is held."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.agents import HotRow
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries
from omnara.domain.claim import Claim

_SQL = Queries("machine_calls")


class NewProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A command to queue. `env` and `secret_env` (names to UUIDs) are JSON text."""

    id: UUID
    agent_id: UUID
    project_id: UUID
    machine_id: UUID
    binding_id: UUID
    tool_call_id: UUID | None
    purpose: str
    command: str
    shell: str
    io_mode: str
    cwd: str
    env: str
    secret_env: str
    wait_ms: int
    timeout_seconds: int


class LockedProcess(msgspec.Struct, frozen=True):
    """A command of an agent. `granted`: a machine took it. `ending`: it has been told to end."""

    id: UUID
    machine_id: UUID
    binding_id: UUID
    state: str
    io_mode: str
    granted: bool
    exit_code: int | None
    exit_signal: str | None
    reason_code: str
    reason_message: str
    default_cursor: int
    ending: bool

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.state in ("exited", "failed", "killed", "unknown")


class ActiveProcess(msgspec.Struct, frozen=True):
    """A command that is not over."""

    id: UUID
    state: str
    command: str
    cwd: str
    io_mode: str
    created_at: datetime
    started_at: datetime | None
    machine_ref: str


async def lock_claimed(
    connection: Connection, claim: Claim, worker_id: UUID, call_id: UUID
) -> tuple[HotRow, CallRow] | None:
    """Lock an agent and then its call for the holder of its claim; None when the claim is no longer that holder's."""
    row = await connection.fetchrow(
        _SQL["lock_claimed"],
        claim.agent_id,
        worker_id,
        claim.claim_token,
        claim.epoch,
        claim.step_number,
        claim.next_sequence,
        call_id,
    )
    if row is None:
        return None
    values = tuple(row)
    return HotRow(*values[:17]), CallRow(*values[17:])


async def park_call(connection: Connection, claim: Claim, worker_id: UUID, call_id: UUID) -> bool:
    """Let a ready call of a locked agent wait for a machine; False when it is not ready or the claim is another's."""
    row = await connection.fetchval(
        _SQL["park_call"], claim.agent_id, call_id, worker_id, claim.claim_token, claim.epoch
    )
    return row is not None


async def insert_process(connection: Connection, new: NewProcess, *, most: int) -> bool:
    """Queue a process of a locked agent. False when `most` of its processes are not over: nothing was queued."""
    return await connection.fetchval(_SQL["insert_process"], *msgspec.structs.astuple(new), most) is not None


async def lock_process(connection: Connection, agent_id: UUID, process_id: UUID) -> LockedProcess | None:
    """Lock a command of a locked agent; None when it has none of this id."""
    row = await connection.fetchrow(_SQL["lock_process"], agent_id, process_id)
    return None if row is None else LockedProcess(*row)


async def active_processes(connection: Connection, agent_id: UUID, limit: int) -> list[ActiveProcess]:
    """Return the newest commands of an agent that are not over."""
    return [ActiveProcess(*row) for row in await connection.fetch(_SQL["active_processes"], agent_id, limit)]


async def insert_action(
    connection: Connection, action_id: UUID, process_id: UUID, call_id: UUID | None, kind: str, payload: str
) -> bool:
    """Queue an action after those before it. `payload` is JSON text. False when the process is over, but for reads.

    Without a call it moves a piece of a file: False also when the call that wants the file is over.
    """
    row = await connection.fetchrow(_SQL["insert_action"], action_id, process_id, call_id, kind, payload)
    return row is not None


async def lock_internal(connection: Connection, process_id: UUID) -> None:
    """Lock a process of this server's own, before its actions: what is read after it is what who held it left."""
    await connection.execute(_SQL["lock_internal"], process_id)


async def internal_process(connection: Connection, process_id: UUID) -> tuple[str, int | None, str, str] | None:
    """Return state, exit code, reason and its message of a process of this server's own."""
    row = await connection.fetchrow(_SQL["internal_process"], process_id)
    return None if row is None else (row[0], row[1], row[2], row[3])


async def internal_actions(
    connection: Connection, process_id: UUID, action_ids: Sequence[UUID]
) -> list[tuple[UUID, str, str, str | None]]:
    """Return id, state, reason and result (JSON text) of actions of such a process, in their order."""
    rows = await connection.fetch(_SQL["internal_actions"], process_id, list(action_ids))
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def forget_actions(connection: Connection, process_id: UUID) -> None:
    """Remove the actions of such a process that were done, with the pieces of a file that they hold."""
    await connection.execute(_SQL["forget_actions"], process_id)


async def end_internal(connection: Connection, process_ids: Collection[UUID], before: str, after: str) -> None:
    """End such processes (`before`), or have their machines end them (`after`). Without effect on what is over."""
    await connection.execute(_SQL["end_internal"], list(process_ids), before, after)


async def lock_transfers(connection: Connection, calls: Collection[tuple[UUID, UUID]]) -> dict[UUID, UUID]:
    """Lock the processes that carry files for these calls (agent, call) of locked agents; return their machines."""
    agents, ids = [agent_id for agent_id, _ in calls], [call_id for _, call_id in calls]
    return {row[0]: row[1] for row in await connection.fetch(_SQL["lock_transfers"], agents, ids)}


async def drop_pieces(connection: Connection, process_ids: Collection[UUID], reason: str) -> None:
    """Remove the actions of such processes with the pieces of files in them. What is on its way counts for nothing."""
    await connection.fetch(_SQL["lock_pieces"], list(process_ids))
    await connection.execute(_SQL["drop_pieces"], list(process_ids), reason)
