"""After the commit: hand what was saved to the streams of this process, and hint to the other replicas.

Source: DESIGN §3 "Hints" (sent after commit, ids only), §6.
"""

from __future__ import annotations

from omnara.domain.advance import Advance, Advanced, NewEvent
from omnara.domain.events import Event, EventKind, decode_meta, decode_payload
from omnara.engine.deps import Deps


def saved_events(item: Advance, done: Advanced) -> list[Event]:
    """The events of a save with the sequences that the database gave them."""
    news: list[NewEvent] = list(item.events)
    if done.begun and item.begin is not None:
        news += [entry.event for entry in item.begin.admit]
    return [
        Event(
            sequence=done.first_sequence + position,
            id=event.id,
            kind=_kind(event.kind),
            turn_id=event.turn_id,
            turn_sequence=event.turn_sequence if event.turn_sequence is not None else done.turn_sequence,
            is_opening=event.is_opening,
            payload=decode_payload(event.kind, done.first_sequence + position, event.payload),
            meta=decode_meta(done.first_sequence + position, event.meta),
            replay=event.replay,
            created_at=done.saved_at,
        )
        for position, event in enumerate(news)
    ]


def tell_saved(deps: Deps, item: Advance, done: Advanced) -> list[Event]:
    """Publish a save: events in memory to local streams, hints to others, tool call states. Returns the events."""
    events = saved_events(item, done)
    if events:
        deps.feed.events(item.agent_id, events)
        deps.hints.events((item.agent_id,))
    for call in item.calls:
        state = "running" if call.run and done.begun else call.state
        deps.feed.tool_call(item.agent_id, call.id, state)
    for moved in item.moved:
        if moved.state != "running" or done.begun:
            deps.feed.tool_call(item.agent_id, moved.id, moved.state)
    return events


def _kind(kind: str) -> EventKind:
    return kind  # type: ignore[return-value]  # written by this process, from the same four words
