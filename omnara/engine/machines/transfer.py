"""One internal process on a machine: started, fed or read in pieces, and ended, within a deadline.

It is a process like any other, so it works on every machine that runs commands, whoever wrote its daemon. Its call
runs, and waits for no report: its worker looks, and removes the pieces once they have been used. Whoever ends the call,
by a cancel or because its worker is dead, ends the process with it (`closing.end_transfers`).
Source: machines.md §7 (limits of reads and writes); features.md (upload and download tools).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.clock import Deadline
from omnara.db import agents, bindings, calls, machine_calls
from omnara.db.agents import HotRow
from omnara.db.bindings import BoundMachine
from omnara.db.connection import Connection
from omnara.db.machine_calls import NewProcess
from omnara.domain import processes as domain
from omnara.engine.deps import Deps
from omnara.engine.machines.approved import not_meant
from omnara.engine.machines.targets import choose, unreachable
from omnara.ids import new_uuid
from omnara.tools.protocol import ToolResult, failed

__all__ = ["LIMIT_S", "Piece", "Transfer", "TransferFailed", "begin"]

LIMIT_S: Final = 30.0
"""Of one file. The machine is told the same limit, so that nothing is left running when this server dies."""
WINDOW: Final = 8
"""Pieces that are on their way at once."""
_FIRST_PAUSE_S: Final = 0.01
_LAST_PAUSE_S: Final = 0.1
TIMED_OUT: Final = "file_transfer_timeout"


class TransferFailed(Exception):
    """The transfer ended without its file; `result` says why, for the model."""

    def __init__(self, result: ToolResult) -> None:
        super().__init__(result.error_code)
        self.result = result


class Piece(msgspec.Struct, frozen=True):
    """What a read saw: output `[cursor, next_cursor)`."""

    cursor: int
    next_cursor: int
    output: str = ""


class Ended(msgspec.Struct, frozen=True):
    """How the process ended."""

    state: str
    exit_code: int | None
    reason_code: str
    reason_message: str


async def begin(
    deps: Deps,
    agent_id: UUID,
    call_id: UUID,
    tool_input: dict[str, Any],
    *,
    purpose: str,
    command: str,
    wait_ms: int,
) -> Transfer | ToolResult:
    """Queue the process on the machine that a call means, or return why not. Own transaction. Raises Unavailable."""

    async def work(connection: Connection) -> tuple[UUID, BoundMachine] | ToolResult:
        hot = await agents.lock_hot_row(connection, agent_id)
        if hot is None or hot.gate == "archived":
            return failed("The agent is archived.", "agent_archived")
        call = await calls.find_call(connection, agent_id, call_id)
        if call is None or call.state != "running":
            return failed("The call is over.", "canceled")
        machine = choose(await bindings.bound_machines(connection, agent_id), tool_input)
        if isinstance(machine, ToolResult):
            return machine
        refused = await not_meant(connection, agent_id, call_id, call.created_at, machine)
        refused = refused or unreachable(machine, deps.settings.machine_grace_s)
        if refused is not None:
            return refused
        new = _process(hot, machine, call_id, purpose=purpose, command=command, wait_ms=wait_ms)
        if not await machine_calls.insert_process(connection, new, most=domain.MAX_LIVE_PER_AGENT):
            return failed("There are too many processes that are not over.", "agent_process_limit_reached")
        return new.id, machine

    begun = await deps.db.run(work)
    if isinstance(begun, ToolResult):
        return begun
    deps.hints.machines((begun[1].machine_id,))
    return Transfer(deps, begun[0], begun[1])


def _process(
    hot: HotRow, machine: BoundMachine, call_id: UUID, *, purpose: str, command: str, wait_ms: int
) -> NewProcess:
    return NewProcess(  # noqa: S604 - the name of a shell on a machine
        id=new_uuid(),
        agent_id=hot.agent_id,
        project_id=hot.project_id,
        machine_id=machine.machine_id,
        binding_id=machine.binding_id,
        tool_call_id=call_id,
        purpose=purpose,
        command=command,
        shell="default",
        io_mode="pipe",
        cwd=domain.working_directory("", machine.cwd, machine.machine_cwd),
        env="{}",
        secret_env="{}",  # noqa: S106 - an empty object
        wait_ms=wait_ms,
        timeout_seconds=round(LIMIT_S),
    )


class Transfer:
    """A process that was queued. `forget` or `abandon` it; a cancelled one is ended with its call."""

    def __init__(self, deps: Deps, process_id: UUID, machine: BoundMachine) -> None:
        self.machine = machine
        self._deps = deps
        self._process_id = process_id
        self._deadline = Deadline(LIMIT_S)

    async def finish(self) -> Ended:
        """Wait until the process is over. Raises TransferFailed after the limit, Unavailable."""

        ended: Ended = await self._until(self._look)
        return ended

    async def ended(self) -> Ended | None:
        """How the process ended, if it is over now."""
        async with self._deps.db.acquire() as connection:
            return await self._look(connection)

    async def _look(self, connection: Connection) -> Ended | None:
        row = await machine_calls.internal_process(connection, self._process_id)
        return None if row is None or row[0] not in domain.OVER else Ended(*row)

    async def read(self, start: int, stop: int) -> str:
        """Return output `[start, stop)` of a process that is over. Raises TransferFailed when it is not all there."""
        found: list[str] = []
        at = start
        while at < stop:
            cursors = range(at, min(stop, at + WINDOW * domain.MAX_OUTPUT_BYTES), domain.MAX_OUTPUT_BYTES)
            payloads = [
                {"cursor": cursor, "max_bytes": min(domain.MAX_OUTPUT_BYTES, stop - cursor), "wait_ms": 0}
                for cursor in cursors
            ]
            before = at
            for result in await self._act("read", payloads):
                piece = msgspec.json.decode(result or "{}", type=Piece)
                if piece.cursor != at or not piece.output:
                    break  # a short piece before it: the rest is asked for again
                found.append(piece.output)
                at = piece.next_cursor
            if at == before:
                raise self._lost()
        return "".join(found)

    async def write(self, pieces: Sequence[str]) -> None:
        """Write pieces to the process's input, and end it. Raises TransferFailed."""
        payloads: list[dict[str, Any]] = [{"data": piece} for piece in pieces]
        payloads[-1]["close_stdin"] = True
        for start in range(0, len(payloads), WINDOW):
            await self._act("write", payloads[start : start + WINDOW])

    async def abandon(self, reason: str = TIMED_OUT) -> None:
        """Have the process ended."""

        async def work(connection: Connection) -> None:
            await machine_calls.end_internal(connection, [self._process_id], reason, reason)
            await machine_calls.drop_pieces(connection, [self._process_id], reason)

        await self._deps.db.run(work)
        self._deps.hints.machines((self.machine.machine_id,))

    async def forget(self) -> None:
        """Remove the pieces that are still stored."""
        async with self._deps.db.acquire() as connection:
            await machine_calls.forget_actions(connection, self._process_id)

    async def _act(self, kind: str, payloads: Sequence[dict[str, Any]]) -> list[str | None]:
        """Queue actions, wait until all are over, and return their results. Raises TransferFailed."""
        ids = [new_uuid() for _ in payloads]

        async def queue(connection: Connection) -> None:
            await machine_calls.lock_internal(connection, self._process_id)
            await machine_calls.forget_actions(connection, self._process_id)
            for action_id, payload in zip(ids, payloads, strict=True):
                text = msgspec.json.encode(payload).decode()
                if not await machine_calls.insert_action(connection, action_id, self._process_id, None, kind, text):
                    raise TransferFailed(failed(domain.describe("process_terminal"), "process_terminal"))

        await self._deps.db.run(queue)
        self._deps.hints.machines((self.machine.machine_id,))

        async def look(connection: Connection) -> list[tuple[UUID, str, str, str | None]] | None:
            rows = await machine_calls.internal_actions(connection, self._process_id, ids)
            return rows if all(row[1] in domain.ACTION_OVER for row in rows) else None

        rows = await self._until(look)
        for _, state, reason, _ in rows:
            if state != "applied":
                raise TransferFailed(failed(domain.describe(reason), reason or "file_transfer_failed"))
        return [row[3] for row in rows]

    async def _until(self, look: Any) -> Any:
        pause_s = _FIRST_PAUSE_S
        while True:
            async with self._deps.db.acquire() as connection:
                found = await look(connection)
            if found is not None:
                return found
            if self._deadline.remaining_s <= 0:
                raise TransferFailed(
                    failed(f"The machine did not do it within {LIMIT_S:.0f} seconds.", TIMED_OUT, retryable=True)
                )
            await asyncio.sleep(min(pause_s, self._deadline.remaining_s))
            pause_s = min(pause_s * 1.5, _LAST_PAUSE_S)

    def _lost(self) -> TransferFailed:
        return TransferFailed(failed("The file's content did not come back whole.", "file_transfer_failed"))
