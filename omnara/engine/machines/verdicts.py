"""What a report says, judged against what is stored: pure rules, so that each has a test without a database.

Whether a report is a repetition is decided by its content, never by its id. Source: machines.md §6.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import msgspec

from omnara.db.processes import Finish, ReportedAction, ReportedProcess
from omnara.domain.processes import (
    ACTION_OVER,
    DEFAULT_READ_BYTES,
    MAX_OUTPUT_BYTES,
    OVER,
    STORAGE_EXHAUSTED,
    STORAGE_EXHAUSTED_MESSAGE,
)
from omnara.domain.text import clean_text
from omnara.ids import IdKind, encode
from omnara.machines.events import (
    ActionApplied,
    ActionFailed,
    ActionUnknown,
    FinishedResult,
    ProcessFinished,
    ProcessStarted,
    ReadObservation,
    StartedResult,
    moment,
)
from omnara.machines.frames import ReportAck

INVALID: Final = "validation_failed"
CONFLICT: Final = "idempotency_conflict"

NOT_GRANTED: Final = "the process was not granted"
ACTION_NOT_GRANTED: Final = "the action was not granted"
NO_SUCH_PROCESS: Final = "the machine has no such process"

MAX_REASON_CHARS: Final = 200
MAX_MESSAGE_CHARS: Final = 4000

ActionEvent = ActionApplied | ActionFailed | ActionUnknown


class Reject(msgspec.Struct, frozen=True):
    """The report can never be accepted; the text says why."""

    code: str
    error: str


class Repeated(msgspec.Struct, frozen=True):
    """The report says what is stored already."""


class Settled(msgspec.Struct, frozen=True):
    """The server has decided otherwise, for good: there is nothing to note."""


class Apply(msgspec.Struct, frozen=True):
    """The report is to be applied."""


class ReadPayload(msgspec.Struct, frozen=True):
    """What a read asked for."""

    cursor: int | None = None
    max_bytes: int = DEFAULT_READ_BYTES
    wait_ms: int = 0


Verdict = Reject | Repeated | Settled | Apply


def contradicts(ack: ReportAck) -> bool:
    """Whether a report was refused because the machine did what nothing here knows of: a database that was set back.

    Only a registration settles that, and a machine with a good line does not register by itself. Source: machines.md
    §14 row 17.
    """
    known = (NOT_GRANTED, ACTION_NOT_GRANTED, NO_SUCH_PROCESS)
    return ack.ack_status == "permanent_reject" and ack.error in known


def judge_started(row: ReportedProcess, event: ProcessStarted) -> Verdict:
    """Judge the report that a command runs."""
    started_at, observed_at = moment(event.started_at), moment(event.observed_at)
    if started_at is None or observed_at is None or started_at > observed_at:
        return Reject(INVALID, "a started process needs started_at, not after observed_at")
    fault = _output_fault(row, event.result, needed=True)
    if fault:
        return Reject(INVALID, fault)
    if row.state == "queued":
        return Reject(INVALID, NOT_GRANTED)
    if row.state in OVER:
        return Settled()
    if row.state == "running":
        same = row.started_at == started_at
        return Repeated() if same else Reject(CONFLICT, "the process was reported with another started_at")
    return Apply()


def judge_finished(row: ReportedProcess, event: ProcessFinished) -> Verdict:
    """Judge the report that a command is over."""
    fault = _finish_fault(row, event) or _output_fault(row, event.result, needed=False)
    if fault:
        return Reject(INVALID, fault)
    if row.state in OVER:
        if _same_end(row, event):
            return Repeated()
        # Only a machine says when a process ended: without that, the server had given it up.
        return Settled() if row.ended_at is None else Reject(CONFLICT, "the process was reported with another end")
    if row.started_at is not None and moment(event.started_at) not in (None, row.started_at):
        return Reject(CONFLICT, "the process was reported with another started_at")
    if row.state == "queued" and not _storage_exhausted(event):
        return Reject(INVALID, NOT_GRANTED)
    return Apply()


def finish_of(event: ProcessFinished, cursor: int | None) -> Finish:
    """Return what is stored of a finished process; `cursor` moves the default of reads."""
    return Finish(
        state=event.state,
        reason_code=clean_text(event.state_reason_code)[:MAX_REASON_CHARS],
        reason_message=clean_text(event.state_reason_message)[:MAX_MESSAGE_CHARS],
        exit_code=_signed(event.exit_code),
        exit_signal=clean_text(event.exit_signal)[:MAX_REASON_CHARS] or None,
        started_at=moment(event.started_at),
        cursor=cursor,
        ended_at=moment(event.ended_at),
    )


def _signed(code: int | None) -> int | None:
    """Return an exit code as 32 bits with a sign: a daemon on Windows tells that of a crash without one."""
    return code if code is None or code < 2**31 else code - 2**32


def judge_action(row: ReportedAction, event: ActionEvent) -> Verdict:
    """Judge the report of what came of an action."""
    state = action_state(event)
    if state != "applied" and not event.state_reason_code:
        return Reject(INVALID, "an action without its effect needs a reason")
    if state == "applied" and row.kind == "read" and event.result is None:
        return Reject(INVALID, "a read needs its result")
    if row.state == "queued":
        return Reject(INVALID, ACTION_NOT_GRANTED)
    if row.state in ACTION_OVER:
        if row.state == state and row.reason_code in ("", clean_text(event.state_reason_code)[:MAX_REASON_CHARS]):
            return Repeated()
        reported = row.state == "applied" and row.kind != "read" and row.reason_code == ""
        return Reject(CONFLICT, "the action was reported with another outcome") if reported else Settled()
    return Apply()


def action_state(event: ActionEvent) -> Literal["applied", "failed", "unknown"]:
    """Return the state that an event leads to."""
    if isinstance(event, ActionApplied):
        return "applied"
    return "failed" if isinstance(event, ActionFailed) else "unknown"


def read_fault(process: ReportedProcess, asked: ReadPayload, seen: ReadObservation) -> bool:
    """Whether a read saw what it cannot have seen: another process, other bytes, or more of them than there are."""
    wanted = process.default_cursor if asked.cursor is None else asked.cursor
    size, span = len(seen.output.encode("utf-8", "replace")), seen.next_cursor - seen.cursor
    return (
        seen.process_id not in ("", encode(IdKind.PROCESS, process.id))
        or seen.cursor < wanted
        or (seen.cursor > wanted and not seen.truncated)
        or span < 0
        or size > min(span, asked.max_bytes, MAX_OUTPUT_BYTES)
    )


def _output_fault(row: ReportedProcess, result: StartedResult | FinishedResult | None, *, needed: bool) -> str | None:
    if result is None:
        return "the result is missing" if needed else None
    if isinstance(result, StartedResult) and result.process_id not in ("", encode(IdKind.PROCESS, row.id)):
        return "the result is another process's"
    if len(result.output.encode("utf-8", "replace")) > MAX_OUTPUT_BYTES:
        return f"the output has more than {MAX_OUTPUT_BYTES} bytes"
    return "next_cursor is before cursor" if result.next_cursor < result.cursor else None


def _finish_fault(row: ReportedProcess, event: ProcessFinished) -> str | None:
    state, ended_at, started_at = event.state, moment(event.ended_at), moment(event.started_at)
    has_code = event.exit_code is not None
    faults: tuple[tuple[bool, str], ...] = (
        (event.observed_at is not None, "a finished process has no observed_at"),
        (ended_at is None and state in ("exited", "killed"), f"a process that {state} needs ended_at"),
        (ended_at is None and state == "failed" and started_at is not None, "a process that ran needs ended_at"),
        (state in ("failed", "unknown") and not event.state_reason_code, f"{state} needs a reason"),
        (state == "exited" and not has_code, "exited needs an exit code"),
        (state in ("killed", "unknown") and has_code, f"{state} has no exit code"),
        (ended_at is not None and started_at is not None and ended_at < started_at, "ended_at is before started_at"),
        (has_code and not -(2**31) <= (event.exit_code or 0) < 2**32, "the exit code is none"),
    )
    return next((text for wrong, text in faults if wrong), None)


def _storage_exhausted(event: ProcessFinished) -> bool:
    """Whether it is the one report that may close a process which was never granted."""
    bare = (event.exit_code, event.exit_signal, event.started_at, event.ended_at, event.result)
    return (
        event.state == "failed"
        and event.state_reason_code == STORAGE_EXHAUSTED
        and event.state_reason_message == STORAGE_EXHAUSTED_MESSAGE
        and bare == (None, "", None, None, None)
    )


def _same_end(row: ReportedProcess, event: ProcessFinished) -> bool:
    end = finish_of(event, None)
    return (
        (row.state, row.reason_code, row.exit_code, row.exit_signal, row.ended_at)
        == (end.state, end.reason_code, end.exit_code, end.exit_signal, end.ended_at)
    ) and end.started_at in (None, row.started_at)


def times(event: ProcessStarted) -> datetime:
    """Return when a started process began; the event was judged."""
    started_at = moment(event.started_at)
    assert started_at is not None, "a judged event has its times"
    return started_at
