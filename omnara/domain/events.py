"""The log's vocabulary: four kinds of event, their stored payloads, and the row that carries one.

An event is written once and never changed. `payload` holds exactly the kind-specific fields of the public contract;
`meta` what only the engine reads. Rows are validated when they are read back: a damaged one raises `DamagedEvent`
and the caller quarantines the agent instead of guessing.
Source: DESIGN §1, §4; api.md §10.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, NoReturn
from uuid import UUID

import msgspec

from omnara.domain.content import InputBlock, OutputBlock, ResultBlock

EventKind = Literal["agent_input", "model_output", "tool_result", "context_checkpoint"]
InputKind = Literal["content", "control", "interaction_response", "config_change"]
StopReason = Literal["end_turn", "tool_use", "max_tokens", "refusal", "content_filter", "error"]
Outcome = Literal["succeeded", "failed", "denied", "canceled"]


class AgentInputPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, control, answer or config change, at the moment when it entered the log. Ids are public ids."""

    agent_input_id: str
    input_kind: InputKind
    content_blocks: list[InputBlock]
    actor_id: str | None = None
    input_idempotency_key: str | None = None
    control_type: Literal["cancel_current"] | None = None
    interaction_id: str | None = None
    agent_config_id: str | None = None


class ModelOutputPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted answer of a model, or the durable record of why there is none (stop reason `error`)."""

    model_call_context_id: str
    stop_reason: StopReason
    content_blocks: list[OutputBlock]


class ToolResultPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The single result of a tool call."""

    tool_call_id: str
    outcome: Outcome
    content_blocks: list[ResultBlock]


class CheckpointPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A summary that stands for everything up to `summarized_through_event_sequence`."""

    context_checkpoint_id: str
    summarized_through_event_sequence: int
    summary: str


Payload = AgentInputPayload | ModelOutputPayload | ToolResultPayload | CheckpointPayload


class EventMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Engine-only facts of a model output (what it had seen, which model made it) and of a checkpoint.

    `truncations` counts the answers in a row that the length limit cut, this one included; `continues`: the turn goes
    on after this one by itself. `compactions` counts the checkpoints since the last accepted output, `answers` the
    model's answers in this turn, this one included. A checkpoint repeats the counts, since whoever reads from it does
    not read what came before.
    """

    frontier: int = 0
    provider: str = ""
    api_format: str = ""
    model: str = ""
    revision_id: str = ""
    truncations: int = 0
    continues: bool = False
    compactions: int = 0
    answers: int = 0


class Event(msgspec.Struct, frozen=True):
    """One entry of an agent's log. `sequence` counts 1, 2, 3, … without gaps; `replay` is provider-exact content."""

    sequence: int
    id: UUID
    kind: EventKind
    turn_id: UUID
    turn_sequence: int
    is_opening: bool
    payload: Payload
    meta: EventMeta
    replay: bytes | None
    created_at: datetime


class DamagedEvent(Exception):
    """A stored row does not decode. Carries the sequence so that the void range can start there."""

    def __init__(self, sequence: int, reason: str) -> None:
        self.sequence = sequence
        super().__init__(f"event {sequence} is damaged: {reason}")


_DECODERS: Final[dict[str, msgspec.json.Decoder[Payload]]] = {
    "agent_input": msgspec.json.Decoder(AgentInputPayload),
    "model_output": msgspec.json.Decoder(ModelOutputPayload),
    "tool_result": msgspec.json.Decoder(ToolResultPayload),
    "context_checkpoint": msgspec.json.Decoder(CheckpointPayload),
}
_META_DECODER: Final = msgspec.json.Decoder(EventMeta)
_ENCODER: Final = msgspec.json.Encoder()
_NO_META: Final = EventMeta()


def encode_payload(payload: Payload | EventMeta) -> str:
    """JSON text as stored. The same value always gives the same bytes, which request caching relies on."""
    return _ENCODER.encode(payload).decode()


def decode_payload(kind: str, sequence: int, payload: str | bytes) -> Payload:
    """Decode a stored payload. Raises DamagedEvent when it does not fit its kind."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        _damaged(sequence, f"unknown kind {kind!r}")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedEvent(sequence, str(error)) from error


def decode_meta(sequence: int, meta: str | bytes | None) -> EventMeta:
    """Decode `events.meta`; a missing one is empty. Raises DamagedEvent."""
    if meta is None:
        return _NO_META
    try:
        return _META_DECODER.decode(meta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedEvent(sequence, str(error)) from error


def _damaged(sequence: int, reason: str) -> NoReturn:
    raise DamagedEvent(sequence, reason)
