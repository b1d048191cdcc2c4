"""The public JSON of an event, made by joining text: the stored payload already holds its kind's fields as served.

Decoding and encoding every event for every reader would cost more than everything else that a stream does. What does
not start as a payload of its kind takes the slow path, and a row that cannot be read is shown as an error in its
place, so that a damaged row neither hides the rest of a log nor breaks a client.
Source: DESIGN §4 (damaged rows stay where they are), api.md §10.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara import ids
from omnara.db.reads import EventRow
from omnara.domain.content import ErrorBlock
from omnara.domain.events import DamagedEvent, Event, ModelOutputPayload, decode_payload, encode_payload
from omnara.ids import IdKind

_FIRST_FIELD: Final = {
    "agent_input": '{"agent_input_id":',
    "model_output": '{"model_call_context_id":',
    "tool_result": '{"tool_call_id":',
    "context_checkpoint": '{"context_checkpoint_id":',
}
DAMAGED_TEXT: Final = "This entry of the log is damaged and was skipped."


class Owner(msgspec.Struct, frozen=True):
    """The part of an event's JSON that is the same for all events of one agent."""

    text: str

    @classmethod
    def of(cls, org_id: UUID, project_id: UUID, agent_id: UUID) -> Owner:
        """Encode the three ids once."""
        return cls(
            f'"org_id":"{ids.encode(IdKind.ORG, org_id)}","project_id":"{ids.encode(IdKind.PROJECT, project_id)}",'
            f'"agent_id":"{ids.encode(IdKind.AGENT, agent_id)}"'
        )


def timestamp(value: datetime) -> str:
    """Return RFC 3339 text in UTC with `Z`. Source: api.md §15."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def stored_event(owner: Owner, row: EventRow) -> str:
    """Return the event object of a stored row. Never raises for what the row holds."""
    kind, payload = row.kind, row.payload
    if not payload.startswith(_FIRST_FIELD.get(kind, "\n")) or "\n" in payload or "\r" in payload:
        kind, payload = _readable(row)
    return _join(owner, row, kind, payload)


def live_event(owner: Owner, event: Event) -> str:
    """Return the event object of an event that was just committed; the same text as its stored row gives."""
    return _join(owner, event, event.kind, encode_payload(event.payload))


def _join(owner: Owner, row: EventRow | Event, kind: str, payload: str) -> str:
    return (
        f'{{"id":"{ids.encode(IdKind.EVENT, row.id)}",{owner.text},'
        f'"turn_id":"{ids.encode(IdKind.TURN, row.turn_id)}","turn_sequence":{row.turn_sequence},'
        f'"is_opening_event":{"true" if row.is_opening else "false"},"sequence":{row.sequence},"event_kind":"{kind}",'
        f'{payload[1:-1]},"created_at":"{timestamp(row.created_at)}"}}'
    )


def _readable(row: EventRow) -> tuple[str, str]:
    """Return kind and compact payload of a row that is not in the stored form, or the error that stands for it."""
    try:
        return row.kind, encode_payload(decode_payload(row.kind, row.sequence, row.payload))
    except DamagedEvent:
        call_id = ids.encode(IdKind.MODEL_CALL, row.id)
        return "model_output", encode_payload(ModelOutputPayload(call_id, "error", [ErrorBlock(DAMAGED_TEXT)]))
