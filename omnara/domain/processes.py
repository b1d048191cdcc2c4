"""Processes on machines: their states and limits, and the JSON that a model is told about them.

One module says what the result of a machine tool looks like, because five writers publish it: reports, the sweeps,
registrations, cancels, and the tools themselves when they refuse.
Source: machines.md §3 (examples), §4 (states, timers), §7 (outcomes, limits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal
from uuid import UUID

from omnara.domain.events import Outcome
from omnara.ids import IdKind, encode

ProcessState = Literal["queued", "starting", "running", "exited", "failed", "killed", "unknown"]
ActionState = Literal["queued", "accepted", "applied", "failed", "unknown"]
ActionKind = Literal["read", "write", "interrupt", "terminate"]
Purpose = Literal["command", "upload", "download"]

LIVE: Final = frozenset({"queued", "starting", "running"})
OVER: Final = frozenset({"exited", "failed", "killed", "unknown"})
ACTION_OVER: Final = frozenset({"applied", "failed", "unknown"})

REPLACED: Final = (
    "This is the first command since the machine was replaced by a new one with the same working directory: what ran "
    "there before has ended, and what was kept elsewhere (in /tmp, in memory) is gone."
)
"""What the first command on a machine that was replaced says besides. Source: field-reports B27."""

MAX_LIVE_PER_AGENT: Final = 32
"""Source: machines.md §4."""
MAX_LISTED: Final = 20
"""Processes that `list_processes` tells. Source: engine.md §7."""
MAX_OUTPUT_BYTES: Final = 65_536
DEFAULT_READ_BYTES: Final = 8_192
MAX_WRITE_BYTES: Final = 131_072
MAX_WAIT_MS: Final = 10_000
"""Source: machines.md §7."""
MAX_OFFER_BYTES: Final = 1_048_576
"""A command with its environment. Source: machines.md §3 (frames), §7."""
OFFERED_PROCESSES: Final = 4
OFFERED_ACTIONS: Final = 16
"""Source: machines.md §3 (drain)."""

STORAGE_EXHAUSTED: Final = "machine_storage_exhausted"
STORAGE_EXHAUSTED_MESSAGE: Final = "the machine ran out of writable storage"

_REASONS: Final[Mapping[str, str]] = {
    "agent_archived": "The agent was archived.",
    "agent_canceled_after_grant": "The turn was canceled while it ran.",
    "agent_canceled_before_grant": "The turn was canceled before it began.",
    "authorization_revoked": "The machine's access was revoked; what it was doing is not known.",
    "execution_not_started": "The command was handed over but did not begin. It may be tried again.",
    "local_action_outcome_unrecoverable": "The action began, but its outcome is not known.",
    "local_process_missing_after_daemon_reconnect": "The machine lost the command; what it did is not known.",
    "machine_binding_released": "The machine was taken from the agent.",
    "machine_decommissioned": "The machine was deleted.",
    "machine_grant_revoked": "The machine was taken from the project.",
    "daemon_uninstalled": "The machine's daemon was uninstalled; what it was doing is not known.",
    "machine_storage_exhausted": STORAGE_EXHAUSTED_MESSAGE[0].upper() + STORAGE_EXHAUSTED_MESSAGE[1:] + ".",
    "machine_unreachable": "The machine cannot be reached.",
    "output_unavailable": "There is no output: the command never ran.",
    "process_action_not_accepted": "The machine did not take the action in time.",
    "process_action_not_delivered": "The action did not reach the command.",
    "process_not_accepted": "No machine took the command in time. It did not run.",
    "process_not_reported": "The machine took it, and is there, but has not said what became of it.",
    "process_state_unknown": "What became of the command is not known.",
    "process_terminal": "The command is over.",
    "reconciliation_conflict": "Server and machine disagree about the command; what it did is not known.",
}

RETRYABLE: Final = frozenset(
    {"execution_not_started", "machine_unreachable", "process_action_not_accepted", "process_not_accepted"}
)
"""Reasons after which the same call may succeed."""

_RAN: Final = frozenset({"nonzero_exit", "signal", "timeout", "terminate_requested"})


def describe(reason_code: str, message: str = "") -> str:
    """Return what a reason means, for a model: the machine's own words, else ours, else the code."""
    return message or _REASONS.get(reason_code) or reason_code


def process_id_text(process_id: UUID) -> str:
    """Return a process's public id."""
    return encode(IdKind.PROCESS, process_id)


def process_outcome(state: str, reason_code: str) -> Outcome:
    """Return the outcome of a call whose process is in `state`: a command that ran, however it ended, was run."""
    if state in ("starting", "running", "exited"):
        return "succeeded"
    return "succeeded" if state in ("failed", "killed") and reason_code in _RAN else "failed"


def command_result(
    process_id: UUID,
    state: str,
    *,
    output: str = "",
    cursor: int = 0,
    next_cursor: int = 0,
    truncated: bool = False,
    exit_code: int | None = None,
    reason_code: str = "",
    message: str = "",
) -> dict[str, Any]:
    """Return the value of a `structured_data` block about a command: what it wrote, and whether it is over.

    `truncated`: not all of the output that was asked for is here. `done`: the command is over.
    """
    over = state in OVER
    value: dict[str, Any] = {
        "process_id": process_id_text(process_id),
        "state": state,
        "output": output,
        "cursor": cursor,
        "next_cursor": next_cursor,
        "truncated": truncated,
        "done": over,
        "exit_code": exit_code,
        "error": reason_code if over else "",
    }
    if over and reason_code and reason_code != "nonzero_exit" and (message or reason_code in _REASONS):
        value["message"] = describe(reason_code, message)
    return value


def action_result(process_id: UUID, state: str, kind: str) -> dict[str, Any]:
    """Return the value for an action that had its effect; a read's is a `command_result`."""
    return {"process_id": process_id_text(process_id), "state": state, "action": kind, "applied": True}


def failure(
    reason_code: str, *, message: str = "", process_id: UUID | None = None, state: str | None = None
) -> dict[str, Any]:
    """Return the value for a call that has no result of the machine's: why, and what is known of the process."""
    text = describe(reason_code, message)
    if reason_code == "machine_unreachable" and state in ("starting", "running"):
        text = f"{text} The command may go on there: it was {state} when the machine was last heard of."
    value: dict[str, Any] = {"error": text, "error_code": reason_code}
    if reason_code in RETRYABLE:
        value["retryable"] = True
    if process_id is not None:
        value["process_id"] = process_id_text(process_id)
    if state is not None:
        value["state"] = state
    return value


def working_directory(requested: str, binding_cwd: str, machine_cwd: str) -> str:
    """Return where a command starts: what is asked for under the binding's directory, and that under the machine's.

    Each may be absolute, and then is where the rest is under. Empty: the machine's own choice, below which it takes
    what is still relative. Source: machines.md §7.
    """
    found = machine_cwd
    for part in (binding_cwd, requested):
        if part:
            found = part if not found or _absolute(part) else f"{found.rstrip('/')}/{part}"
    return found


def _absolute(path: str) -> bool:
    return path.startswith(("/", "\\")) or path[1:3] in (":\\", ":/")
