"""Commands on machines, as transactional tools: each queues a row and leaves its call to the machine's report.

A command or an action is inserted in the transaction in which its call begins to wait, so there is exactly one of each
for a call whatever dies. Who completes the call: `reports` (the machine spoke), `closing` (cancel, archive, release),
`sweeps` (the machine kept silent). Source: engine.md §7; machines.md §4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import bindings, machine_calls
from omnara.db.bindings import BoundMachine
from omnara.db.machine_calls import LockedProcess, NewProcess
from omnara.domain import processes as domain
from omnara.domain.content import StructuredDataBlock
from omnara.domain.text import is_blank
from omnara.engine.machines import sandbox, tools_machines
from omnara.engine.machines.approved import invalidated
from omnara.engine.machines.targets import choose, connection_of, environment, unreachable
from omnara.engine.tool_tx import Ahead, Outcome, Queued, Transaction, TransactionalTool
from omnara.ids import IdKind, InvalidPublicId, decode, encode, new_uuid
from omnara.tools.builtin.machine_processes import MAX_COMMAND_BYTES
from omnara.tools.protocol import MALFORMED, ToolResult, failed, succeeded

__all__ = ["TRANSACTIONAL_TOOLS"]

MAX_SHOWN_COMMAND: Final = 200


async def lock_for_command(ahead: Ahead) -> Any:
    """Make ready what a first command may need: the pool of sandboxes, for an agent without machines."""
    if ahead.definition.machine_sources:
        return None
    return await sandbox.lock_pool(ahead)


async def run_command(tx: Transaction) -> Outcome:
    """Queue a command; its process's first report completes the call. Source: engine.md §7."""
    command: str = tx.input["command"]
    if is_blank(command):
        return failed("The command is empty.", MALFORMED)
    if len(command.encode()) > MAX_COMMAND_BYTES:
        return failed(
            f"The command is longer than {MAX_COMMAND_BYTES} bytes. Put it into a file and run that.", MALFORMED
        )
    machines = await bindings.bound_machines(tx.connection, tx.agent_id)
    if tx.ahead is not None and sandbox.needs_one(machines):
        made = await sandbox.add(tx)
        if isinstance(made, ToolResult):
            return made
        machines = await bindings.bound_machines(tx.connection, tx.agent_id)
    machine = choose(machines, tx.input)
    if isinstance(machine, ToolResult):
        return machine
    refused = await invalidated(tx, machine) or unreachable(machine, tx.deps.settings.machine_grace_s)
    if refused is not None:
        return refused
    most = domain.MAX_LIVE_PER_AGENT
    if not await machine_calls.insert_process(tx.connection, _process(tx, machine, command), most=most):
        return failed(
            f"There are {most} processes that are not over, which is the most. Stop one of them first.",
            "agent_process_limit_reached",
        )
    return Queued((machine.machine_id,), there=connection_of(machine) == "online")


def _process(tx: Transaction, machine: BoundMachine, command: str) -> NewProcess:
    env, secret_env = environment(machine)
    return NewProcess(
        id=new_uuid(),
        agent_id=tx.agent_id,
        project_id=tx.project_id,
        machine_id=machine.machine_id,
        binding_id=machine.binding_id,
        tool_call_id=tx.call_id,
        purpose="command",
        command=command,
        shell=tx.input.get("shell", "default"),
        io_mode=tx.input.get("io_mode", "pipe"),
        cwd=domain.working_directory(tx.input.get("cwd", ""), machine.cwd, machine.machine_cwd),
        env=env,
        secret_env=secret_env,
        wait_ms=tx.input.get("wait_ms", domain.MAX_WAIT_MS),
        timeout_seconds=0,
    )


async def read_process(tx: Transaction) -> Outcome:
    """Queue a read; the machine's report completes the call. What never ran has nothing to read."""
    process = await _find(tx)
    if isinstance(process, ToolResult):
        return process
    if process.is_over and not process.granted:
        value = domain.command_result(
            process.id, process.state, reason_code=process.reason_code, message=process.reason_message
        )
        return succeeded(StructuredDataBlock(value))
    payload: dict[str, Any] = {"max_bytes": tx.input.get("max_bytes", domain.DEFAULT_READ_BYTES)}
    payload |= {name: tx.input[name] for name in ("cursor", "wait_ms") if name in tx.input}
    return await _act(tx, process, "read", payload)


async def write_process(tx: Transaction) -> Outcome:
    """Queue a write to standard input. Source: machines.md §7."""
    data: str = tx.input.get("data", "")
    close = tx.input.get("close_stdin", False)
    if not data and not close:
        return failed("There is nothing to write.", MALFORMED)
    if len(data.encode()) > domain.MAX_WRITE_BYTES:
        return failed(f"data is longer than {domain.MAX_WRITE_BYTES} bytes: write it in pieces.", MALFORMED)
    process = await _find(tx)
    if isinstance(process, ToolResult):
        return process
    if close and process.io_mode == "pty":
        return failed("The input of a terminal cannot be closed; write \\u0004 (Ctrl-D).", "close_stdin_unsupported")
    refused = _refused(process)
    if refused is not None:
        return refused
    return await _act(tx, process, "write", {"data": data} | ({"close_stdin": True} if close else {}))


async def stop_process(tx: Transaction) -> Outcome:
    """Queue an interrupt or the end of a process; to end what is over or ending succeeds. Source: machines.md §4."""
    process = await _find(tx)
    if isinstance(process, ToolResult):
        return process
    mode = tx.input.get("mode", "terminate")
    if mode == "terminate" and (process.is_over or process.ending):
        value = domain.action_result(process.id, process.state, mode)
        return succeeded(StructuredDataBlock(value | {"already_stopped": process.is_over}))
    refused = _refused(process)
    return refused if refused is not None else await _act(tx, process, mode, {})


async def list_processes(tx: Transaction) -> Outcome:
    """List what is not over."""
    rows = await machine_calls.active_processes(tx.connection, tx.agent_id, domain.MAX_LISTED)
    shown = [
        {
            "process_id": encode(IdKind.PROCESS, row.id),
            "state": row.state,
            "machine_ref": row.machine_ref,
            "command": row.command if len(row.command) <= MAX_SHOWN_COMMAND else row.command[:MAX_SHOWN_COMMAND] + "…",
            "cwd": row.cwd,
            "io_mode": row.io_mode,
            "created_at": row.created_at.isoformat(),
        }
        for row in rows
    ]
    return succeeded(StructuredDataBlock({"processes": shown}))


async def _find(tx: Transaction) -> LockedProcess | ToolResult:
    unknown = failed("You have no such process.", "process_not_found")
    try:
        process_id = decode(IdKind.PROCESS, tx.input["process_id"].strip())
    except InvalidPublicId:
        return unknown
    return await machine_calls.lock_process(tx.connection, tx.agent_id, process_id) or unknown


def _refused(process: LockedProcess) -> ToolResult | None:
    """Why nothing more can be done to a process, if so."""
    if process.is_over:
        return _failed("process_terminal", process)
    if process.ending:
        return failed("The process has been told to end.", "process_ending", process_id=_text(process.id))
    return None


async def _act(tx: Transaction, process: LockedProcess, kind: str, payload: dict[str, Any]) -> Outcome:
    machines = await bindings.bound_machines(tx.connection, tx.agent_id)
    machine = next((machine for machine in machines if machine.binding_id == process.binding_id), None)
    if machine is None or not machine.granted:
        return _failed("machine_binding_released", process)
    away = unreachable(machine, tx.deps.settings.machine_grace_s)
    if away is not None:
        return away
    text = msgspec.json.encode(payload).decode()
    await machine_calls.insert_action(tx.connection, new_uuid(), process.id, tx.call_id, kind, text)
    return Queued((machine.machine_id,), there=connection_of(machine) == "online")


def _failed(reason_code: str, process: LockedProcess) -> ToolResult:
    value = domain.failure(reason_code, process_id=process.id, state=process.state)
    return ToolResult("failed", (StructuredDataBlock(value),), reason_code)


def _text(process_id: UUID) -> str:
    return encode(IdKind.PROCESS, process_id)


TRANSACTIONAL_TOOLS: Final[Mapping[str, TransactionalTool]] = {
    "run_command": TransactionalTool(run_command, lock_for_command),
    "read_process": TransactionalTool(read_process),
    "write_process": TransactionalTool(write_process),
    "stop_process": TransactionalTool(stop_process),
    "list_processes": TransactionalTool(list_processes),
    **tools_machines.TOOLS,
}
"""The machine tools by name. Source: engine.md §7."""
