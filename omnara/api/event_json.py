"""The public JSON of an event, made by joining text: the stored payload already holds its kind's fields as served.

Nothing is encoded again. A stored payload is decoded once to see that it is one of its kind, which costs a few
microseconds; a row that is not is shown as an error in its place, so that a damaged row neither hides the rest of a
log nor breaks a client.
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


def stored_event(owner: Owner, row: EventRow) -> tuple[str, str]:
    """Return kind and event object of a stored row. Never raises for what the row holds."""
    kind, payload = row.kind, row.payload
    try:
        decoded = decode_payload(kind, row.sequence, payload)
        if not payload.startswith('{"') or "\n" in payload or "\r" in payload:
            payload = encode_payload(decoded)
    except DamagedEvent:
        kind, payload = "model_output", _stand_in(row)
    return kind, _join(owner, row, kind, payload)


def live_event(owner: Owner, event: Event) -> str:
    """Return the event object of an event that was just committed; the same text as its stored row gives."""
    return _join(owner, event, event.kind, encode_payload(event.payload))


def _join(owner: Owner, row: EventRow | Event, kind: str, payload: str) -> str:
    # Only inputs open turns; a stand-in for a damaged one is no input any more.
    opens = "true" if row.is_opening and kind == "agent_input" else "false"
    return (
        f'{{"id":"{ids.encode(IdKind.EVENT, row.id)}",{owner.text},'
        f'"turn_id":"{ids.encode(IdKind.TURN, row.turn_id)}","turn_sequence":{row.turn_sequence},'
        f'"is_opening_event":{opens},"sequence":{row.sequence},"event_kind":"{kind}",'
        f'{payload[1:-1]},"created_at":"{timestamp(row.created_at)}"}}'
    )


def _stand_in(row: EventRow) -> str:
    """Return the payload that is shown in the place of one that cannot be read."""
    call_id = ids.encode(IdKind.MODEL_CALL, row.id)
    return encode_payload(ModelOutputPayload(call_id, "error", [ErrorBlock(DAMAGED_TEXT)]))
