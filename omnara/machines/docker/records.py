"""Reads what the shim writes. It comes out of a container whose user may do anything there: nothing of it is trusted.

What does not look like a record is a HomeLost, never a wrong record and never an exception of another kind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import msgspec

from omnara.ids import IdKind, InvalidPublicId, decode
from omnara.machines.processes import (
    ActionKind,
    ActionOutcome,
    ActionRecord,
    ExitRecord,
    HomeLost,
    OutputSlice,
    ProcessRecord,
)

__all__ = ["Reply", "actions_of", "process_of", "processes_of", "slice_of"]

Phase = Literal["prepared", "accepted", "terminal"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_OFFSET: Final = 10**16 + 2**32
"""No command has written more than the name of a chunk can tell, and no server would take a number without a bound."""
_STATES: Final = frozenset({"exited", "failed", "killed", "unknown"})
_OUTCOMES: Final = frozenset({"applied", "failed", "unknown"})
_KINDS: Final = frozenset(get_args(ActionKind))
_MESSAGES: Final[Mapping[str, str]] = {
    "cwd": "the working directory does not exist",
    "shell": "the shell is not installed on this machine",
    "lost": "the machine was restarted before the command began",
    "processes": "the machine has as many processes as it may have, and none was left for the command",
}
_REFUSALS: Final[Mapping[str, str]] = {
    "close_stdin_unsupported": "A terminal's input cannot be closed.",
    "stdin_closed": "The process's standard input is closed.",
}


class Reply(msgspec.Struct, frozen=True):
    """What one request was answered: lines without their ends, and the bytes of a slice."""

    lines: tuple[str, ...]
    data: bytes = b""


def process_of(reply: Reply, process_id: str) -> ProcessRecord:
    """Return the process in a reply to a question about that one. Raises HomeLost."""
    with _Untrusted():
        found = [_record(*each) for each in _processes(reply.lines)]
        if len(found) != 1 or found[0].process_id != process_id:
            raise HomeLost("the container does not know the process")
        return found[0]


def processes_of(reply: Reply) -> list[ProcessRecord]:
    """Return the processes in a reply, oldest first. What is not ours is passed over: the agent may write there."""
    found: list[tuple[int, ProcessRecord]] = []
    for head, ended, actions in _processes(reply.lines):
        try:
            record = _record(head, ended, actions)
            decode(IdKind.PROCESS, record.process_id)
            for action in record.actions:
                decode(IdKind.PROCESS_ACTION, action.action_id)
            found.append((int(head[3]), record))
        except (ValueError, IndexError, OverflowError, InvalidPublicId):
            continue
    return [record for _, record in sorted(found, key=lambda pair: (pair[0], pair[1].process_id))]


def actions_of(reply: Reply) -> list[ActionRecord]:
    """Return the actions in a reply. Raises HomeLost."""
    with _Untrusted():
        return [_action(line.split(" ")) for line in reply.lines if line.startswith("a ")]


def slice_of(reply: Reply, asked: int) -> OutputSlice:
    """Return the slice of output in a reply. Raises HomeLost."""
    with _Untrusted():
        _, at, end, dropped, closed, _ = reply.lines[0].split(" ")
        cursor = _number(at)
        return OutputSlice(
            data=reply.data,
            cursor=cursor,
            next_cursor=cursor + len(reply.data),
            end=max(_number(end), cursor + len(reply.data)),
            dropped=dropped == "1" and cursor > asked,
            closed=closed == "1",
        )


class _Untrusted:
    """Turns what parsing raises into HomeLost."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | IndexError | OverflowError):
            raise HomeLost("the container's answer is not one of the shim") from error


def _processes(lines: Iterable[str]) -> Iterator[tuple[list[str], list[str] | None, list[list[str]]]]:
    """Yield the lines of each process in words: its own, that of its end, and those of its actions."""
    head: list[str] = []
    ended: list[str] | None = None
    actions: list[list[str]] = []
    for line in lines:
        words = line.split(" ")
        match words[0]:
            case "p":
                head, ended, actions = words, None, []
            case "x":
                ended = words
            case "a":
                actions.append(words)
            case "e":
                yield head, ended, actions


def _record(head: Sequence[str], end: list[str] | None, actions: Iterable[list[str]]) -> ProcessRecord:
    _, process_id, supervisor_id, _, live, committed, _, begun, oldest, newest, acks = head
    ended = None if end is None else _exit(end)
    phase: Phase = "terminal" if ended is not None else "accepted" if committed == "1" else "prepared"
    return ProcessRecord(
        process_id=process_id,
        supervisor_id=supervisor_id,
        phase=phase,
        supervisor_live=live == "1",
        execution_committed=committed == "1",
        started_at=_time(begun),
        output_start=_number(oldest),
        output_end=_number(newest),
        exit=ended,
        actions=tuple(sorted((_action(words) for words in actions), key=lambda action: action.seq)),
        started_acknowledged="s" in acks,
        exit_acknowledged="x" in acks,
    )


def _exit(words: Sequence[str]) -> ExitRecord:
    _, state, why, code, number, begun, ended = words
    if state not in _STATES:
        raise ValueError(state)
    if begun != "-" and ended != "-" and int(ended) < int(begun):
        raise ValueError(ended)
    reason, _, detail = why.partition(":")
    return ExitRecord(
        state=state,  # type: ignore[arg-type]
        reason_code="" if reason == "-" else reason,
        reason_message=_MESSAGES.get(detail, detail),
        exit_code=-1 if number != "-" else None if code == "-" else _number(code, -1, 255),
        exit_signal=None if number == "-" else _signal_name(int(number)),
        started_at=None if reason == "start_failed" else _time(begun),
        ended_at=_time(ended),
    )


def _action(words: Sequence[str]) -> ActionRecord:
    _, action_id, kind, seq, state, why, acknowledged = words
    if kind not in _KINDS or state not in _OUTCOMES | {"-"}:
        raise ValueError(kind)
    outcome = None
    if state != "-":
        outcome = ActionOutcome(
            state=state,  # type: ignore[arg-type]
            reason_code="" if why == "-" else why,
            reason_message=_REFUSALS.get(why, ""),
        )
    return ActionRecord(
        action_id=action_id,
        kind=kind,  # type: ignore[arg-type]
        seq=_number(seq),
        outcome=outcome,
        acknowledged=acknowledged == "1",
    )


def _number(text: str, low: int = 0, high: int = _MAX_OFFSET) -> int:
    """Return a number that a server takes; whoever runs in the container can write any. Raises ValueError."""
    found = int(text)
    if not low <= found <= high:
        raise ValueError(text)
    return found


def _time(microseconds: str) -> str | None:
    if microseconds == "-":
        return None
    moment = _EPOCH + timedelta(microseconds=int(microseconds))
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _signal_name(number: int) -> str:
    """Return a signal's name as a shell would tell it: `killed`, `terminated`, `segmentation fault`."""
    try:
        text = signal.strsignal(number)
    except ValueError:
        text = None
    return (text or f"signal {number}").lower()
