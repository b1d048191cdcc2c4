"""What is written to a command's standard input: all of it, or an honest "unknown".

Source: machines.md §7 (131,072 bytes, 10 s; partial or blocked is unknown, `stdin_write_unknown`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["AFTER_THE_END", "UNRECOVERABLE", "Outcome", "Stdin", "Write", "outcome"]

Outcome = dict[str, Any]


def outcome(state: str, code: str = "", text: str = "") -> Outcome:
    """Make an action's outcome."""
    return {"state": state, "reason_code": code, "reason_message": text}


UNRECOVERABLE = outcome("unknown", "local_action_outcome_unrecoverable", "Whether this happened is not known.")
AFTER_THE_END = {
    "write": outcome("failed", "process_terminal", "The process has ended."),
    "interrupt": outcome("failed", "process_terminal", "The process has ended."),
    "terminate": outcome("applied", "already_stopped"),
}
"""Source: machines.md §4 (on the end of a process)."""


class Write:
    """One write that is under way. `done` is called once, with its outcome."""

    def __init__(self, data: bytes, *, close: bool, deadline: float, done: Callable[[Outcome], None]) -> None:
        """Begin with nothing written; `deadline` is on the monotonic clock."""
        self.left = memoryview(data)
        self.size = len(data)
        self.close = close
        self.deadline = deadline
        self.done = done


class Stdin:
    """The keeper's end of a command's input. `waiting` holds writes, the first of which is under way."""

    def __init__(self, fd: int, *, terminal: bool) -> None:
        """Take over a descriptor that does not block."""
        self.fd: int | None = fd
        self.terminal = terminal
        self.waiting: list[Write] = []

    def add(self, write: Write) -> None:
        """Begin a write, or have it wait for those before it."""
        if write.close and self.terminal:
            write.done(outcome("failed", "close_stdin_unsupported", "A terminal's input cannot be closed."))
            return
        self.waiting.append(write)
        if len(self.waiting) == 1:
            self.go_on()

    def go_on(self) -> None:
        """Write as much as goes in without waiting."""
        while self.waiting:
            write = self.waiting[0]
            result = self._some(write)
            if result is None:
                return
            self.waiting.pop(0)
            write.done(result)

    def _some(self, write: Write) -> Outcome | None:
        """Return the outcome, or None when the command has to read first."""
        if self.fd is None:
            return outcome("failed", "stdin_closed", "The process's standard input is closed.")
        while write.left:
            try:
                written = os.write(self.fd, write.left)
            except BlockingIOError:
                return None
            except OSError as error:
                self.shut()
                if len(write.left) < write.size:
                    return self.unknown(write)
                return outcome("failed", "stdin_closed", f"The process does not read its input: {error.strerror}.")
            write.left = write.left[written:]
        if write.close:
            self.shut()
        return outcome("applied")

    @staticmethod
    def unknown(write: Write) -> Outcome:
        """Say that a write stopped halfway."""
        done = write.size - len(write.left)
        text = f"{done} of {write.size} bytes were taken before the process stopped reading."
        return outcome("unknown", "stdin_write_unknown", text)

    def expire(self, now: float) -> bool:
        """Give up on a write that has been blocked for too long; says whether that happened. The rest goes on."""
        if not self.waiting or now < self.waiting[0].deadline:
            return False
        write = self.waiting.pop(0)
        write.done(self.unknown(write))
        self.go_on()
        return True

    def end(self) -> None:
        """The command is over: what was written in part is unknown, what was not begun failed."""
        self.shut()
        while self.waiting:
            write = self.waiting.pop(0)
            begun = len(write.left) < write.size
            write.done(self.unknown(write) if begun else AFTER_THE_END["write"])

    def shut(self) -> None:
        """Close the input: the command reads its end. May be called again."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
