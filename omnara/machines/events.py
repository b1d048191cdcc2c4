"""What a machine reports: one event for each slot (started, finished, one per action), and the times in them.

Peers written in Go send an absent time as the first moment of year 1 and fractions of nine digits; both are undone
here, so that nobody else has to know. Source: machines.md §3 (wire traps), §6.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec

__all__ = [
    "STORAGE_EXHAUSTED",
    "STORAGE_EXHAUSTED_MESSAGE",
    "ActionApplied",
    "ActionFailed",
    "ActionUnknown",
    "Event",
    "FinishedResult",
    "ProcessFinished",
    "ProcessStarted",
    "ReadObservation",
    "StartedResult",
    "moment",
]

STORAGE_EXHAUSTED: Final = "machine_storage_exhausted"
STORAGE_EXHAUSTED_MESSAGE: Final = "the machine ran out of writable storage"
"""The only reason, with its only message, that may close a process which was never granted. Source: machines.md §6."""

Cursor = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_TIME: Final = re.compile(
    r"(\d{4}-(?:0[1-9]|1[0-2])-\d{2})[Tt]([0-2]\d:[0-5]\d:[0-5]\d)(?:\.(\d{1,9}))?([Zz]|[+-][0-2]\d:[0-5]\d)"
)


def moment(text: str | None) -> datetime | None:
    """Return the time that a peer wrote, in UTC, cut to microseconds; None for a missing one (year 1 as well).

    Raises ValueError for anything that is no RFC 3339 time.
    """
    if text is None or text == "":
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError("a time must be written as RFC 3339")
    day, clock, fraction, zone = found.groups()
    zone = "+00:00" if zone in "Zz" else zone
    micros = (fraction or "").ljust(6, "0")[:6]
    try:
        value = datetime.fromisoformat(f"{day}T{clock}.{micros}{zone}")
        return None if value.year == 1 else value.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError("a time must be written as RFC 3339") from error


def _checked(value: str | None) -> str | None:
    return None if moment(value) is None else value


class StartedResult(msgspec.Struct, frozen=True, kw_only=True):
    """A command that runs on, with its output so far."""

    process_id: str = ""
    state: str = "running"
    output: str = ""
    cursor: Cursor = 0
    next_cursor: Cursor = 0
    truncated: bool = False
    done: bool = False
    exit_code: int | None = None
    error: str = ""


class FinishedResult(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is over, with its output from the start; `error` is the reason's code."""

    state: str = ""
    exit_code: int | None = None
    output: str = ""
    cursor: Cursor = 0
    next_cursor: Cursor = 0
    truncated: bool = False
    done: bool = True
    error: str = ""


class ReadObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Output `[cursor, next_cursor)`. `truncated`: bytes that were asked for are gone, or more are there."""

    process_id: str = ""
    output: str = ""
    cursor: Cursor = 0
    next_cursor: Cursor = 0
    truncated: bool = False


class ProcessStarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="process_started"):
    """First output, or the wait is over, and the command still runs. `started_at` ≤ `observed_at`."""

    process_id: str
    started_at: str | None = None
    observed_at: str | None = None
    result: StartedResult | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "started_at", _checked(self.started_at))
        msgspec.structs.force_setattr(self, "observed_at", _checked(self.observed_at))


class ProcessFinished(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="process_finished"
):
    """The command is over, or never began (`failed` without times)."""

    process_id: str
    state: Literal["exited", "failed", "killed", "unknown"]
    exit_code: int | None = None
    exit_signal: str = ""
    state_reason_code: str = ""
    state_reason_message: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    observed_at: str | None = None
    result: FinishedResult | None = None

    def __post_init__(self) -> None:
        for name in ("started_at", "ended_at", "observed_at"):
            msgspec.structs.force_setattr(self, name, _checked(getattr(self, name)))


class _ActionEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    process_id: str
    process_action_id: str
    state_reason_code: str = ""
    state_reason_message: str = ""
    result: ReadObservation | None = None


class ActionApplied(_ActionEvent, frozen=True, kw_only=True, tag_field="type", tag="process_action_applied"):
    """The action had its effect; a read carries what it saw."""


class ActionFailed(_ActionEvent, frozen=True, kw_only=True, tag_field="type", tag="process_action_failed"):
    """The action had no effect, for a reason."""


class ActionUnknown(_ActionEvent, frozen=True, kw_only=True, tag_field="type", tag="process_action_unknown"):
    """The action was begun, and nobody knows what came of it, for a reason. It is not repeated."""


Event = ProcessStarted | ProcessFinished | ActionApplied | ActionFailed | ActionUnknown
