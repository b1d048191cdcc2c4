"""What a home of processes must be able to do, so that one runtime can run commands in all of them.

A home keeps, durably, one directory for each process: the specification, the execution bit, the output, the exit
record, one mark for each action whose effect was begun and one for its outcome, and which reports the server has
acknowledged. It outlives the runtime: whoever opens the home next (the daemon after a kill, another replica for a
container) finds all that is needed to claim its processes.
Source: machines.md §4 (execution bit, effect mark), §5 (claims), §7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

__all__ = [
    "ActionOutcome",
    "ActionRecord",
    "ExitRecord",
    "Home",
    "HomeFull",
    "HomeLost",
    "OutputSlice",
    "ProcessRecord",
    "ProcessSpec",
    "StartFailed",
]

Phase = Literal["preparing", "prepared", "accepted", "terminal"]
ActionKind = Literal["write", "interrupt", "terminate"]


class StartFailed(Exception):
    """The process cannot be started here (no such shell or directory, no PTY); the text says why, for the model."""


class HomeFull(Exception):
    """The machine's disk is full: nothing was begun."""


class HomeLost(Exception):
    """The home cannot be reached now (the engine is away, the container is gone). What runs there may run on."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it is to be run: everything resolved. `env` may hold secrets and is never written to disk readable
    by others; `cwd` is absolute or empty (the home's own directory)."""

    process_id: str
    command: str
    shell: str = "default"
    io_mode: Literal["pipe", "pty"] = "pipe"
    cwd: str = ""
    env: Mapping[str, str] = {}
    timeout_seconds: int = 0


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended, as its home saw it; never changes once the disk has it. Source: machines.md §6, §7.

    Times are RFC 3339 in UTC with microseconds. `state` exited: code 0; failed: another code, a signal, or no start.
    """

    state: Literal["exited", "failed", "killed", "unknown"]
    reason_code: str = ""
    reason_message: str = ""
    exit_code: int | None = None
    exit_signal: str | None = None
    started_at: str | None = None
    ended_at: str | None = None


class ActionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an action with an effect; never changes once written."""

    state: Literal["applied", "failed", "unknown"]
    reason_code: str = ""
    reason_message: str = ""


class ActionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An action of which the home has a mark. Without `outcome` its effect was begun and its end is not known (yet)."""

    action_id: str
    kind: ActionKind
    seq: int
    outcome: ActionOutcome | None = None
    acknowledged: bool = False


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a home knows of one process. `supervisor_id` names the launch; `output_end` is the next byte's offset."""

    process_id: str
    supervisor_id: str
    phase: Phase
    supervisor_live: bool
    execution_committed: bool
    started_at: str | None = None
    output_start: int = 0
    output_end: int = 0
    exit: ExitRecord | None = None
    actions: Sequence[ActionRecord] = ()
    started_acknowledged: bool = False
    exit_acknowledged: bool = False


class OutputSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes `[cursor, next_cursor)` of the merged output. `dropped`: bytes from what was asked to `cursor` are gone.

    `end` is the offset after the last byte that exists now; `closed`: no more will come.
    """

    data: bytes
    cursor: int
    next_cursor: int
    end: int
    dropped: bool
    closed: bool


class Home(Protocol):
    """Where processes run. Every method may be cancelled; what was begun is then found by `processes`.

    Raises HomeLost from everything when the home cannot be reached. Calls for different processes may run at once; the
    runtime calls one at a time for the actions of one process.
    """

    async def processes(self) -> list[ProcessRecord]:
        """Return what is kept here, oldest first: after a restart of the runtime, all that it has to claim."""
        ...

    async def prepare(self, spec: ProcessSpec) -> ProcessRecord:
        """Make the process durable without running anything. Again for a known id: returns what is there.

        Raises StartFailed, HomeFull.
        """
        ...

    async def execute(self, process_id: str, wait_s: float) -> ProcessRecord:
        """Take the execution bit and run the command, once in the life of the directory; never a second time.

        Returns when there is output, when it ended, or after `wait_s`. A start that fails is an exit record.
        """
        ...

    async def watch(self, process_id: str, known_end: int, wait_s: float) -> ProcessRecord:
        """Return when the process has ended, has output beyond `known_end`, or after `wait_s`."""
        ...

    async def read(self, process_id: str, cursor: int, max_bytes: int) -> OutputSlice:
        """Return output from `cursor`, or from the oldest byte kept when that is later. Also after the end."""
        ...

    async def write(self, process_id: str, action_id: str, seq: int, data: bytes, close: bool) -> ActionOutcome:
        """Write to standard input, after an effect mark; again for a known id: the recorded outcome, never the effect.

        Partial or blocked for 10 s: unknown, `stdin_write_unknown`.
        """
        ...

    async def signal(
        self, process_id: str, action_id: str, seq: int, kind: Literal["interrupt", "terminate"]
    ) -> ActionOutcome:
        """SIGINT to the process group, or SIGTERM and after 2 s SIGKILL; marked and repeated as `write`."""
        ...

    async def stop(self, process_id: str, reason_code: str) -> None:
        """End a process for administrative reasons: recorded as `unknown` with that reason (or it stays as ended)."""
        ...

    async def acknowledge(self, process_id: str, slot: str) -> None:
        """Keep durably that the server has the report of a slot: `started`, `exit`, or an action's id."""
        ...

    async def forget(self, process_id: str) -> None:
        """Remove a process that is over or was never executed, with its output. Unknown ids are fine."""
        ...
