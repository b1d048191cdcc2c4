"""What the files of a process say, put together. Everything here blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from omnara.machines.posix.keeper import files
from omnara.machines.posix.keeper.output import OutputReader
from omnara.machines.posix.keeper.stdin import AFTER_THE_END
from omnara.machines.processes import ActionKind, ActionOutcome, ActionRecord, ExitRecord, Phase, ProcessRecord

__all__ = [
    "ACKNOWLEDGED",
    "acknowledged",
    "action_of",
    "checked",
    "is_settled",
    "prepared",
    "reader_of",
    "record_of",
    "without_keeper",
]

ACKNOWLEDGED = "acknowledged"
_ACTION = files.action_file("")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked(name: str) -> str:
    """Return an id that can be the name of a file. Raises ValueError."""
    if _ID.fullmatch(name) is None:
        raise ValueError(f"not an id: {name[:200]!r}")
    return name


def reader_of(fd: int) -> OutputReader:
    """Return what reads the output."""
    return OutputReader(fd, (files.read_meta(fd) or {})["piece_bytes"])


def acknowledged(fd: int) -> frozenset[str]:
    """List the slots whose reports have arrived."""
    try:
        file = os.open(ACKNOWLEDGED, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
    except FileNotFoundError:
        return frozenset()
    with open(file, encoding="utf-8") as lines:
        return frozenset(line.rstrip("\n") for line in lines)


def action_of(fd: int, action_id: str, known: frozenset[str] = frozenset()) -> ActionRecord | None:
    """Read an action's record; `known` are the acknowledged slots. Raises ValueError for what is no id."""
    pair = files.read_pair(fd, files.action_file(checked(action_id)))
    if pair is None or "kind" not in pair[0]:
        return None
    first, second = pair
    return ActionRecord(
        action_id=action_id,
        kind=first["kind"],
        seq=first["seq"],
        outcome=None if second is None else msgspec.convert(second, ActionOutcome),
        acknowledged=action_id in known,
    )


def _actions(fd: int, known: frozenset[str]) -> list[ActionRecord]:
    names = [name[len(_ACTION) :] for name in os.listdir(fd) if name.startswith(_ACTION)]
    found = [action_of(fd, name, known) for name in names]
    return sorted((action for action in found if action is not None), key=lambda action: action.seq)


def is_settled(record: ProcessRecord) -> bool:
    """Over, and the server knows all about it. Only `started` may never have been told, and never will be.

    An end that the server knows may be lost here, by a computer that lost power; then it will be written once more.
    """
    over = record.exit is not None and record.exit_acknowledged
    return over and all(action.acknowledged for action in record.actions)


def prepared(process_id: str, supervisor_id: str) -> ProcessRecord:
    """Return what `record_of` finds in a directory that was made a moment ago."""
    return ProcessRecord(
        process_id=process_id,
        supervisor_id=supervisor_id,
        phase="prepared",
        supervisor_live=True,
        execution_committed=False,
        actions=[],
    )


def _exit(fd: int) -> ExitRecord | None:
    found = files.read_exit(fd)
    return None if found is None else msgspec.convert(found, ExitRecord)


def record_of(fd: int, process_id: str) -> ProcessRecord:
    """Put together what the files say. Read in this order, a process that ends meanwhile is never taken for dead."""
    bit = files.read_bit(fd)
    ended = _exit(fd)
    live = ended is None and (bit is None or files.held(fd))
    if ended is None and not live:
        ended = _exit(fd)
    known = acknowledged(fd)
    start, end = reader_of(fd).span()
    phase: Phase = "terminal" if ended is not None else "prepared" if bit is None else "accepted"
    started_at = ended.started_at if ended is not None else (bit or ({},))[0].get("started_at")
    return ProcessRecord(
        process_id=process_id,
        supervisor_id=(files.read_meta(fd) or {})["supervisor_id"],
        phase=phase,
        supervisor_live=live,
        execution_committed=bit is not None,
        started_at=started_at,
        output_start=start,
        output_end=end,
        exit=ended,
        actions=_actions(fd, known),
        started_acknowledged="started" in known,
        exit_acknowledged="exit" in known,
    )


def without_keeper(record: ProcessRecord, kind: ActionKind) -> Mapping[str, str]:
    """Say what an action comes to when nobody can do it. Source: machines.md §4."""
    if record.exit is not None and record.exit.state != "unknown":
        return AFTER_THE_END[kind]
    if not record.execution_committed:
        return {"state": "failed", "reason_code": "process_not_running", "reason_message": "It was not started yet."}
    text = "What became of the process is not known."
    return {"state": "failed", "reason_code": "process_state_unknown", "reason_message": text}
