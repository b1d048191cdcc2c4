"""How a command's end is told. Source: machines.md §7 (outcomes)."""

from __future__ import annotations

from typing import Any

from .leader import Ended, signal_name

__all__ = ["FULL", "of"]

FULL = "machine_storage_exhausted"
_STOPPED = {
    "terminate_requested": ("killed", "The process was stopped as asked."),
    "timeout": ("failed", "The process ran longer than it was allowed to and was stopped."),
    FULL: ("failed", "The machine's disk is full; the process was stopped because its output could not be kept."),
    "stdin_write_unknown": ("unknown", "The process was stopped: it did not read what was written to its terminal."),
}


def of(reason: str, ended: Ended | None) -> dict[str, Any]:
    """Return the record of an end: `reason` when it was ended from outside, otherwise how the shell ended."""
    if reason:
        state, text = _STOPPED.get(reason, ("unknown", f"The process was stopped: {reason}."))
        return {"state": state, "reason_code": reason, "reason_message": text}
    code, number = ended or (None, None)
    if number is not None:
        name = signal_name(number)
        text = f"The process was ended by a signal: {name}."
        return {
            "state": "failed",
            "reason_code": "signal",
            "reason_message": text,
            "exit_code": -1,
            "exit_signal": name,
        }
    if code == 0:
        return {"state": "exited", "exit_code": 0}
    return {"state": "failed", "reason_code": "nonzero_exit", "exit_code": code}
