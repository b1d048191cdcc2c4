"""The events that a runtime reports, made from a home's records. Source: machines.md §3 (examples), §6 (validation)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, assert_never

from omnara.machines import wire
from omnara.machines.processes import ActionOutcome, ExitRecord, Home, ProcessRecord
from omnara.machines.runtime.output import Seen, seen

__all__ = [
    "action_event",
    "finished_event",
    "lost_event",
    "never_started",
    "now_text",
    "started_event",
    "storage_event",
]

_MESSAGE_LIMIT: Final = 2_000


def now_text() -> str:
    """Return this machine's time as RFC 3339 in UTC. It dates what happened here; it decides nothing."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


async def _from_the_start(home: Home, process_id: str) -> Seen:
    return seen(await home.read(process_id, 0, wire.MAX_OUTPUT_BYTES), wire.MAX_OUTPUT_BYTES)


async def started_event(home: Home, record: ProcessRecord) -> wire.ProcessStarted:
    """Return the event for a command that runs, with its output so far. Raises what `home.read` raises."""
    now = now_text()
    started_at = record.started_at or now
    output = await _from_the_start(home, record.process_id)
    # A clock that was set back must not make a report that no server takes.
    observed_at = now if (wire.moment(now) or 0) >= (wire.moment(started_at) or 0) else started_at  # type: ignore[operator]
    return wire.ProcessStarted(
        process_id=record.process_id,
        started_at=started_at,
        observed_at=observed_at,
        result=wire.StartedResult(
            process_id=record.process_id,
            output=output.text,
            cursor=output.cursor,
            next_cursor=output.next_cursor,
            truncated=output.truncated,
        ),
    )


async def finished_event(home: Home, process_id: str, ended: ExitRecord) -> wire.ProcessFinished:
    """Return the event for a command that is over, with its output. Raises what `home.read` raises."""
    output = await _from_the_start(home, process_id)
    exit_code = ended.exit_code if ended.state in ("exited", "failed") else None
    started_at, ended_at = _ordered(ended.started_at, ended.ended_at)
    return wire.ProcessFinished(
        process_id=process_id,
        state=ended.state,
        exit_code=exit_code,
        exit_signal=ended.exit_signal or "",
        state_reason_code=ended.reason_code,
        state_reason_message=ended.reason_message[:_MESSAGE_LIMIT],
        started_at=started_at,
        ended_at=ended_at,
        result=wire.FinishedResult(
            state=ended.state,
            exit_code=exit_code,
            output=output.text,
            cursor=output.cursor,
            next_cursor=output.next_cursor,
            truncated=output.truncated,
            error=ended.reason_code,
        ),
    )


def _ordered(started_at: str | None, ended_at: str | None) -> tuple[str | None, str | None]:
    """The two times, the end not before the start: a clock may have been set back in between."""
    started, ended = wire.moment(started_at), wire.moment(ended_at)
    if started is not None and ended is not None and ended < started:
        return started_at, started_at
    return started_at, ended_at


def never_started(process_id: str, reason_code: str, message: str) -> wire.ProcessFinished:
    """Return the event for a command that was granted and could not be begun."""
    return wire.ProcessFinished(
        process_id=process_id,
        state="failed",
        state_reason_code=reason_code,
        state_reason_message=message[:_MESSAGE_LIMIT],
        result=wire.FinishedResult(state="failed", error=reason_code),
    )


def lost_event(process_id: str) -> wire.ProcessFinished:
    """Return the event for a command whose files somebody removed: nobody will know what became of it."""
    return wire.ProcessFinished(
        process_id=process_id,
        state="unknown",
        state_reason_code="local_state_missing",
        state_reason_message="what this machine kept of the command is gone",
    )


def storage_event(process_id: str) -> wire.ProcessFinished:
    """Return the one event that may close a process which was never granted: no other field is allowed in it."""
    return wire.ProcessFinished(
        process_id=process_id,
        state="failed",
        state_reason_code=wire.STORAGE_EXHAUSTED,
        state_reason_message=wire.STORAGE_EXHAUSTED_MESSAGE,
    )


def action_event(process_id: str, action_id: str, outcome: ActionOutcome) -> wire.Event:
    """Return the event for an action that is over."""
    kind: type[wire.ActionApplied | wire.ActionFailed | wire.ActionUnknown]
    match outcome.state:
        case "applied":
            kind = wire.ActionApplied
        case "failed":
            kind = wire.ActionFailed
        case "unknown":
            kind = wire.ActionUnknown
        case _:
            assert_never(outcome.state)
    return kind(
        process_id=process_id,
        process_action_id=action_id,
        state_reason_code=outcome.reason_code,
        state_reason_message=outcome.reason_message[:_MESSAGE_LIMIT],
    )
