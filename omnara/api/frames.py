"""The bytes of event-stream frames. Source: api.md §11 (order id, event, data; no `retry:` line).

Every payload is one line of JSON and every name comes from a fixed list, so content can forge no frame
(field-reports B35).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara import ids
from omnara.api.types import Error, ErrorCode
from omnara.engine.feed_items import Delta
from omnara.ids import IdKind

OPENED: Final = b": ok\n\n"
HEARTBEAT: Final = b": heartbeat\n\n"


def durable(place: int | str, kind: str, event: str) -> bytes:
    """Return the frame of an event, given its JSON. Its id is the place from which a reader resumes: the sequence, or
    the text of a place in a project's joint log."""
    return f"id: {place}\nevent: {kind}\ndata: {event}\n\n".encode()


def place_only(place: str) -> bytes:
    """Return a frame that tells a reader its place and nothing else; a client shows no event for it."""
    return f"id: {place}\n\n".encode()


def call_update(call_id: UUID, state: str) -> bytes:
    """Return the frame that tells a tool call's new state."""
    public_id = ids.encode(IdKind.TOOL_CALL, call_id)
    return f'event: tool_call_update\ndata: {{"tool_call_id":"{public_id}","state":"{state}"}}\n\n'.encode()


def model_delta(delta: Delta, seq: int) -> bytes:
    """Return the frame of a run of deltas that is number `seq` of its call on this connection."""
    return b'event: model_output_delta\ndata: %b"event":%b}\n\n' % (
        (
            f'{{"turn_id":"{delta.turn_id}","model_call_context_id":"{delta.call_id}","seq":{seq},'
            f'"source_seq_start":{delta.first},"source_seq_end":{delta.last},"coalesced_count":{delta.count},'
        ).encode(),
        delta.event_json(),
    )


def error(code: ErrorCode, text: str) -> bytes:
    """Return the frame that ends a stream: `service_unavailable` makes clients come back, `internal_error` stop."""
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(Error(text, code))
