"""The frames themselves, as values: one Struct for each payload, in both directions. `wire` reads and writes them.

Apart from the codec because inside one process (a pool machine and its driver) frames travel without ever being JSON.
Source: machines.md §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from omnara.machines.events import Event
from omnara.machines.registration import Platform, Seq

__all__ = [
    "ActionAccept",
    "ActionAcceptAck",
    "ActionOffer",
    "ErrorFrame",
    "FromDaemon",
    "FromServer",
    "Heartbeat",
    "HeartbeatAck",
    "ProcessAccept",
    "ProcessAcceptAck",
    "ProcessOffer",
    "ProcessTerminate",
    "Report",
    "ReportAck",
    "RuntimeEnded",
    "SkillOffer",
    "SkillReport",
    "UnfitReport",
    "Unknown",
]


# --- from a runtime to its server ---------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The runtime is alive, and this channel reaches it."""

    daemon_instance_id: str
    observed_platform: Platform | None = None


class ProcessAccept(msgspec.Struct, frozen=True, kw_only=True):
    """The process is prepared here; the runtime asks for the grant to run it."""

    process_id: str


class ActionAccept(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime asks for the grant to perform an action."""

    process_id: str
    process_action_id: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `report_id` only matches the acknowledgement to it."""

    report_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    event: Event


class UnfitReport(msgspec.Struct, frozen=True):
    """A report that is one by its form, of an event that nobody can report. Only read, never written."""

    report_id: str


class SkillReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A skill is there, or could not be fetched."""

    request_id: str
    skill_id: str
    state: str
    error_code: str = ""
    error: str = ""


# --- from the server to a runtime ---------------------------------------------------------------------------


class HeartbeatAck(msgspec.Struct, frozen=True, kw_only=True):
    """The beat was counted; the next one is due after so many milliseconds."""

    next_heartbeat_after_ms: Annotated[int, msgspec.Meta(gt=0)]


def _zero() -> int:
    return 0


class ProcessOffer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command to be run. With `preparation_error` nothing else counts: accept it, and report it as failed."""

    process_id: str
    preparation_error: str = ""
    io_mode: str = ""
    command: str = ""
    shell_selector: str = ""
    cwd: str = ""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    wait_ms: int = 0
    timeout_seconds: int = msgspec.field(default_factory=_zero)  # a factory, so that it is written when zero, too


class ProcessAcceptAck(msgspec.Struct, frozen=True, kw_only=True):
    """The grant: from here on the process may be run, once."""

    process_id: str


class ProcessTerminate(msgspec.Struct, frozen=True, kw_only=True):
    """The server wants a process to end, whatever it does."""

    process_id: str


class ActionOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An action on a process; `payload` depends on the kind."""

    process_id: str
    process_action_id: str
    action_kind: Literal["write", "read", "interrupt", "terminate"]
    seq: Seq
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class ActionAcceptAck(msgspec.Struct, frozen=True, kw_only=True):
    """The grant of an action, with what a read without a cursor starts at."""

    process_id: str
    process_action_id: str
    process_state: str = ""
    default_output_cursor: int = 0


class ReportAck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a report. Source: machines.md §6."""

    ack_status: Literal["committed", "cleanup_only", "permanent_reject", "transient_error"]
    report_id: str
    error_code: str = ""
    error: str = ""


class ErrorFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something could not be done. With a `process_id` it concerns that process."""

    error_code: str
    error: str = ""
    process_id: str = ""
    process_action_id: str = ""


class RuntimeEnded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """This runtime is no longer the machine's, for a reason."""

    error_code: str
    error: str = ""


class SkillOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A skill to be fetched by HTTP with a short-lived capability."""

    request_id: str
    skill_id: str
    revision_id: str
    download_token: str
    download_expires_at: int
    digest: str


class Unknown(msgspec.Struct, frozen=True):
    """A frame of a type that this version does not know."""

    type: str


FromDaemon = Heartbeat | ProcessAccept | ActionAccept | Report | UnfitReport | SkillReport | Unknown
FromServer = (
    HeartbeatAck
    | ProcessOffer
    | ProcessAcceptAck
    | ProcessTerminate
    | ActionOffer
    | ActionAcceptAck
    | ReportAck
    | ErrorFrame
    | RuntimeEnded
    | SkillOffer
    | Unknown
)
