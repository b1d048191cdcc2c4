"""The fold: what an agent's log says about its turn and its open tool calls.

The hot row carries the same facts in columns, since a save may decide from that row alone; this fold is the canonical
reading, used to check them (`sql/checks`, property tests) and to rebuild them when an operator goes back in the log.
Source: DESIGN §4; engine.md §1.2 and §8.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from omnara.domain.content import ToolCallBlock
from omnara.domain.events import AgentInputPayload, Event, ModelOutputPayload, ToolResultPayload


class LogState(msgspec.Struct):
    """Facts about a log up to and including `sequence`. Mutable on purpose: the fold runs over long logs."""

    sequence: int = 0
    turn_id: UUID | None = None
    turn_sequence: int = 0
    turn_open: bool = False
    batch_sequence: int | None = None
    open_calls: dict[str, ToolCallBlock] = msgspec.field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Advance by one event. Events must come in order of sequence; voided ones are simply not given."""
        self.sequence = event.sequence
        self.turn_id = event.turn_id
        self.turn_sequence = event.turn_sequence
        payload = event.payload
        if isinstance(payload, ModelOutputPayload):
            self._apply_output(event, payload)
        elif isinstance(payload, ToolResultPayload):
            self._apply_result(payload)
        elif isinstance(payload, AgentInputPayload):
            if payload.input_kind == "content":
                self.turn_open = True
            elif payload.input_kind == "control":
                self.turn_open = False

    def _apply_output(self, event: Event, payload: ModelOutputPayload) -> None:
        calls = [block for block in payload.content_blocks if isinstance(block, ToolCallBlock)]
        self.turn_open = bool(calls) or event.meta.continues
        self.open_calls = {call.tool_call_id: call for call in calls}
        self.batch_sequence = event.sequence if calls else None

    def _apply_result(self, payload: ToolResultPayload) -> None:
        self.open_calls.pop(payload.tool_call_id, None)
        if not self.open_calls:
            self.batch_sequence = None


def fold(events: Iterable[Event]) -> LogState:
    """Fold a whole log, oldest event first."""
    state = LogState()
    for event in events:
        state.apply(event)
    return state
