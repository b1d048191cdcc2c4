"""Reads what the shim writes. It comes out of a container whose user may do anything there: nothing of it is trusted.

What does not look like a record is a HomeLost, never a wrong record and never an exception of another kind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import msgspec

from omnara.machines.processes import (
    ActionKind,
    ActionOutcome,
    ActionRecord,
    ExitRecord,
    HomeLost,
    OutputSlice,
    ProcessRecord,
)

__all__ = ["Reply", "actions_of", "processes_of", "slice_of"]

Phase = Literal["prepared", "accepted", "terminal"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STATES: Final = frozenset({"exited", "failed", "killed", "unknown"})
_OUTCOMES: Final = frozenset({"applied", "failed", "unknown"})
_KINDS: Final = frozenset(get_args(ActionKind))
_MESSAGES: Final[Mapping[str, str]] = {
    "cwd": "the working directory does not exist",
    "shell": "the shell is not installed on this machine",
    "lost": "the machine was restarted before the command began",
}


class Reply(msgspec.Struct, frozen=True):
    """What one request was answered: lines without their ends, and the bytes of a slice."""

    lines: tuple[str, ...]
    data: bytes = b""


def processes_of(reply: Reply) -> list[tuple[int, ProcessRecord]]:
    """Return the processes in a reply with the microsecond in which each was made. Raises HomeLost."""
    with _Untrusted():
        return list(_processes(reply.lines))


def actions_of(reply: Reply) -> list[ActionRecord]:
    """Return the actions in a reply. Raises HomeLost."""
    with _Untrusted():
        return [_action(line.split(" ")) for line in reply.lines if line.startswith("a ")]


def slice_of(reply: Reply, asked: int) -> OutputSlice:
    """Return the slice of output in a reply. Raises HomeLost."""
    with _Untrusted():
        _, at, end, dropped, closed, _ = reply.lines[0].split(" ")
        cursor = int(at)
        return OutputSlice(
            data=reply.data,
            cursor=cursor,
            next_cursor=cursor + len(reply.data),
            end=max(int(end), cursor + len(reply.data)),
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


def _processes(lines: Iterable[str]) -> Iterator[tuple[int, ProcessRecord]]:
    head: list[str] = []
    ended: ExitRecord | None = None
    actions: list[ActionRecord] = []
    for line in lines:
        words = line.split(" ")
        match words[0]:
            case "p":
                head, ended, actions = words, None, []
            case "x":
                ended = _exit(words)
            case "a":
                actions.append(_action(words))
            case "e":
                yield int(head[3]), _record(head, ended, actions)


def _record(head: Sequence[str], ended: ExitRecord | None, actions: list[ActionRecord]) -> ProcessRecord:
    _, process_id, supervisor_id, _, live, committed, _, begun, oldest, end, acks = head
    phase: Phase = "terminal" if ended is not None else "accepted" if committed == "1" else "prepared"
    return ProcessRecord(
        process_id=process_id,
        supervisor_id=supervisor_id,
        phase=phase,
        supervisor_live=live == "1",
        execution_committed=committed == "1",
        started_at=_time(begun),
        output_start=int(oldest),
        output_end=int(end),
        exit=ended,
        actions=tuple(sorted(actions, key=lambda action: action.seq)),
        started_acknowledged="s" in acks,
        exit_acknowledged="x" in acks,
    )


def _exit(words: Sequence[str]) -> ExitRecord:
    _, state, why, code, number, begun, ended = words
    if state not in _STATES:
        raise ValueError(state)
    reason, _, detail = why.partition(":")
    return ExitRecord(
        state=state,  # type: ignore[arg-type]
        reason_code="" if reason == "-" else reason,
        reason_message=_MESSAGES.get(detail, detail),
        exit_code=-1 if number != "-" else None if code == "-" else int(code),
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
        outcome = ActionOutcome(state=state, reason_code="" if why == "-" else why)  # type: ignore[arg-type]
    return ActionRecord(
        action_id=action_id,
        kind=kind,  # type: ignore[arg-type]
        seq=int(seq),
        outcome=outcome,
        acknowledged=acknowledged == "1",
    )


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
