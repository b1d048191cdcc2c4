"""The frames between a machine's runtime and its server, and their JSON.

Every frame is `{"type", "payload"}`. Fields that are not known are ignored and, so that a newer peer can say more, a
type that is not known is a value too. What is malformed closes the socket it came by, and nothing else.
Source: machines.md §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from omnara.machines.events import (
    STORAGE_EXHAUSTED,
    STORAGE_EXHAUSTED_MESSAGE,
    ActionApplied,
    ActionFailed,
    ActionUnknown,
    Event,
    FinishedResult,
    ProcessFinished,
    ProcessStarted,
    ReadObservation,
    StartedResult,
    moment,
)
from omnara.machines.frames import (
    ActionAccept,
    ActionAcceptAck,
    ActionOffer,
    ErrorFrame,
    FromDaemon,
    FromServer,
    Heartbeat,
    HeartbeatAck,
    ProcessAccept,
    ProcessAcceptAck,
    ProcessOffer,
    ProcessTerminate,
    Report,
    ReportAck,
    RuntimeEnded,
    SkillOffer,
    SkillReport,
    UnfitReport,
    Unknown,
)
from omnara.machines.registration import (
    MAX_BODY_BYTES,
    ActionClaim,
    ActionDirective,
    BootstrapResponse,
    Platform,
    ProcessClaim,
    ProcessDirective,
    Reconciliation,
    RegisterRequest,
    RegisterResponse,
    RuntimeBody,
)

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_OUTPUT_BYTES",
    "MAX_WAIT_MS",
    "MAX_WRITE_BYTES",
    "STORAGE_EXHAUSTED",
    "STORAGE_EXHAUSTED_MESSAGE",
    "ActionAccept",
    "ActionAcceptAck",
    "ActionApplied",
    "ActionClaim",
    "ActionDirective",
    "ActionFailed",
    "ActionOffer",
    "ActionUnknown",
    "BootstrapResponse",
    "ErrorFrame",
    "Event",
    "FinishedResult",
    "FrameError",
    "FromDaemon",
    "FromServer",
    "Heartbeat",
    "HeartbeatAck",
    "Platform",
    "ProcessAccept",
    "ProcessAcceptAck",
    "ProcessClaim",
    "ProcessDirective",
    "ProcessFinished",
    "ProcessOffer",
    "ProcessStarted",
    "ProcessTerminate",
    "ReadObservation",
    "ReadPayload",
    "Reconciliation",
    "RegisterRequest",
    "RegisterResponse",
    "Report",
    "ReportAck",
    "RuntimeBody",
    "RuntimeEnded",
    "SkillOffer",
    "SkillReport",
    "StartedResult",
    "UnfitReport",
    "Unknown",
    "WritePayload",
    "decode_from_daemon",
    "decode_from_server",
    "encode",
    "moment",
    "read_payload",
    "write_payload",
]

MAX_FRAME_BYTES: Final = 1_048_576
"""Largest frame in either direction. Source: machines.md §3."""
MAX_OUTPUT_BYTES: Final = 65_536
"""Most output that one report or read carries. Source: machines.md §6, §7."""
MAX_WRITE_BYTES: Final = 131_072
DEFAULT_READ_BYTES: Final = 8_192
MAX_WAIT_MS: Final = 10_000
"""Longest wait that a command or a read may ask for. Source: machines.md §6, §7."""


class FrameError(ValueError):
    """A frame that is malformed, too large, or of the other direction. The text never repeats what was in it."""


_FROM_DAEMON: Final[Mapping[str, type[Any]]] = {
    "heartbeat": Heartbeat,
    "process_accept": ProcessAccept,
    "action_accept": ActionAccept,
    "report": Report,
    "skill_report": SkillReport,
}
_FROM_SERVER: Final[Mapping[str, type[Any]]] = {
    "heartbeat_ack": HeartbeatAck,
    "process_offer": ProcessOffer,
    "process_accept_ack": ProcessAcceptAck,
    "process_terminate": ProcessTerminate,
    "action_offer": ActionOffer,
    "action_accept_ack": ActionAcceptAck,
    "report_ack": ReportAck,
    "error": ErrorFrame,
    "runtime_ended": RuntimeEnded,
    "skill_offer": SkillOffer,
}
_NAMES: Final = {kind: name for names in (_FROM_DAEMON, _FROM_SERVER) for name, kind in names.items()}


class ReadPayload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where to read from (None: the action's default cursor), how much at most, and how long to wait for something."""

    cursor: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | msgspec.UnsetType = msgspec.UNSET
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUT_BYTES)] = DEFAULT_READ_BYTES
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)] = 0


class WritePayload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to write to standard input, and whether to close it then. At most 131,072 bytes of UTF-8."""

    data: str = ""
    close_stdin: bool = False

    def __post_init__(self) -> None:
        if not self.data and not self.close_stdin:
            raise ValueError("nothing to write")
        if len(self.data.encode()) > MAX_WRITE_BYTES:
            raise ValueError("too much to write at once")


class _Envelope(msgspec.Struct, frozen=True):
    type: str
    payload: msgspec.Raw


class _AnyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What every version's events have in common: the types of their fields."""

    type: str = ""
    process_id: str = ""
    process_action_id: str = ""
    state: str = ""
    exit_code: int | None = None
    exit_signal: str = ""
    state_reason_code: str = ""
    state_reason_message: str = ""
    started_at: str | None = None
    ended_at: str | None = None
    observed_at: str | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")

    def __post_init__(self) -> None:
        for text in (self.started_at, self.ended_at, self.observed_at):
            moment(text)


class _AnyReport(msgspec.Struct, frozen=True):
    report_id: str = ""
    event: _AnyEvent | None = None


_encoder: Final = msgspec.json.Encoder()
_envelope: Final = msgspec.json.Decoder(_Envelope)
_decoders: Final = {
    kind: msgspec.json.Decoder(kind) for names in (_FROM_DAEMON, _FROM_SERVER) for kind in names.values()
}
_any_report: Final = msgspec.json.Decoder(_AnyReport)
_read_payload: Final = msgspec.json.Decoder(ReadPayload)
_write_payload: Final = msgspec.json.Decoder(WritePayload)


def encode(frame: FromDaemon | FromServer) -> bytes:
    """Return the frame as JSON. Raises FrameError when it is larger than any peer takes."""
    name = _NAMES.get(type(frame))
    if name is None:
        raise FrameError("a frame of an unknown type cannot be sent")
    data = _encoder.encode({"type": name, "payload": frame})
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame may have {MAX_FRAME_BYTES} bytes, this one has {len(data)}")
    return data


def decode_from_daemon(data: bytes | str) -> FromDaemon:
    """Return what a runtime sent; `Unknown` for any type that only others send. Raises FrameError.

    A report of an event that no runtime can report is an `UnfitReport`.
    """
    frame: FromDaemon = _decode(data, _FROM_DAEMON)
    return frame


def decode_from_server(data: bytes | str) -> FromServer:
    """Return what a server sent; `Unknown` for a newer server's types. Raises FrameError, also for a runtime's types.

    A server that speaks as a runtime is no server, and the connection to it ends. Source: machines.md §3.
    """
    frame = _decode(data, _FROM_SERVER)
    if isinstance(frame, Unknown) and frame.type in _FROM_DAEMON:
        raise FrameError(f"only a runtime sends {frame.type}")
    return frame  # type: ignore[no-any-return]


def _decode(data: bytes | str, kinds: Mapping[str, type[Any]]) -> Any:
    # Counted before reading: a string's characters are at most its bytes.
    if len(data) > MAX_FRAME_BYTES or (isinstance(data, str) and len(data.encode()) > MAX_FRAME_BYTES):
        raise FrameError(f"a frame may have {MAX_FRAME_BYTES} bytes")
    try:
        envelope = _envelope.decode(data)
        if not bytes(envelope.payload).startswith(b"{"):
            raise FrameError("a frame's payload must be an object")
        kind = kinds.get(envelope.type)
        return Unknown(envelope.type) if kind is None else _payload_of(kind, envelope.payload)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FrameError(_fault(error)) from error


def _payload_of(kind: type[Any], payload: msgspec.Raw) -> Any:
    try:
        return _decoders[kind].decode(payload)
    except msgspec.ValidationError:
        if kind is not Report:
            raise
        # Well formed, with an event that cannot be: that is judged (§6), not cut off, or it would be sent for ever.
        return UnfitReport(_any_report.decode(payload).report_id)


def _fault(error: Exception) -> str:
    """Say what is wrong with a frame without repeating any of it: decoders quote what they choke on."""
    if isinstance(error, msgspec.ValidationError):
        where = str(error).rpartition(" - at `")[2]
        return f"a field is missing or wrong at {where.rstrip('`')}" if where else "a field is missing or wrong"
    return "a frame must be one JSON object"


def read_payload(payload: msgspec.Raw) -> ReadPayload:
    """Return a read action's payload. Raises FrameError; nulls and unknown fields are wrong. Source: machines.md §7."""
    return _payload(_read_payload, payload)


def write_payload(payload: msgspec.Raw) -> WritePayload:
    """Return a write action's payload. Raises FrameError; an empty write that closes nothing is wrong."""
    return _payload(_write_payload, payload)


P = TypeVar("P")


def _payload(decoder: msgspec.json.Decoder[P], payload: msgspec.Raw) -> P:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise FrameError(_fault(error)) from error
