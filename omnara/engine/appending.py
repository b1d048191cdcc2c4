"""One API transaction's additions to one agent's log, made under the lock on its hot row.

Sequences come from the locked row, so they are dense whatever else happens; the row is written back once, at the end,
which also moves the generation that tells a claim holder to look again.
Source: DESIGN §2, invariant 1; coordination §2, §9.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from omnara.db import agents, calls
from omnara.db.agents import HotRow, NewEventRow, NewTurnRow, Wake
from omnara.db.calls import CallRow, Completion
from omnara.db.connection import Connection
from omnara.db.reads import EventRow
from omnara.domain.claim import Claim
from omnara.domain.content import ResultBlock
from omnara.domain.events import (
    AgentInputPayload,
    Outcome,
    Payload,
    ToolResultPayload,
    encode_payload,
)
from omnara.errors import NotFound
from omnara.ids import IdKind, encode, new_uuid


class Appending:
    """Collects events, turns and finished calls of a locked agent; `write` puts them into the database.

    Live only inside the transaction that locked `hot`. Changes to `hot` itself are written too.
    """

    def __init__(self, connection: Connection, hot: HotRow) -> None:
        self.hot = hot
        self._connection = connection
        self._events: list[NewEventRow] = []
        self._turns: list[NewTurnRow] = []
        self._completions: list[Completion] = []
        self.completed: list[CallRow] = []
        """Rows of the calls that `write` completed."""

    @classmethod
    async def lock(cls, connection: Connection, agent_id: UUID) -> Appending:
        """Lock the agent. The first statement of the transaction that concerns it. Raises NotFound."""
        hot = await agents.lock_hot_row(connection, agent_id)
        if hot is None:
            raise NotFound
        return cls(connection, hot)

    @property
    def grew(self) -> bool:
        """Whether an event was added."""
        return bool(self._events)

    def open_turn(self) -> None:
        """Start a new turn; the next event is its first."""
        self.hot.turn_id = new_uuid()
        self.hot.turn_sequence += 1
        self._turns.append(NewTurnRow(self.hot.turn_sequence, self.hot.turn_id, self.hot.next_sequence))

    def add_input(self, payload: AgentInputPayload, *, opening: bool = False, semantic: bool = False) -> NewEventRow:
        """Add an input's event to the current turn."""
        return self._add("agent_input", payload, opening=opening, semantic=semantic)

    def add_result(self, call: CallRow, outcome: Outcome, blocks: Sequence[ResultBlock]) -> NewEventRow:
        """Add the result of an open call, complete the call, and count it off the batch."""
        payload = ToolResultPayload(encode(IdKind.TOOL_CALL, call.id), outcome, list(blocks))
        event = self._add("tool_result", payload, opening=False, semantic=False)
        self._completions.append(Completion(call.id, outcome, event.sequence))
        if self.hot.batch_sequence == call.output_sequence:
            self.hot.open_calls -= 1
            if self.hot.open_calls == 0:
                self.hot.batch_sequence = None
        return event

    async def write(self, wake: Wake, *, release: bool = False) -> list[EventRow]:
        """Write everything and the hot row; return the new events. `release` takes a claim away.

        Raises RuntimeError when a call was not open any more: the lock rules that out, so the transaction must end.
        """
        rows = await self._write_rows()
        await agents.write_hot_row(self._connection, self.hot, wake, release=release)
        return rows

    async def write_under_claim(self, claim: Claim, worker_id: UUID) -> list[EventRow]:
        """As `write`, for the claim's holder: it knows what it wrote, so the generation stays. Results only.

        Raises RuntimeError when the claim is another's, which the lock rules out, so the transaction must end.
        """
        rows = await self._write_rows()
        if not await agents.write_claimed_row(self._connection, self.hot, worker_id, claim.claim_token, claim.epoch):
            raise RuntimeError("a claim moved under the lock of its agent")
        return rows

    async def _write_rows(self) -> list[EventRow]:
        if self._turns:
            await agents.open_turns(self._connection, self.hot.agent_id, self._turns)
        created_at: datetime | None = None
        if self._events:
            created_at = await agents.append_events(self._connection, self.hot.agent_id, self._events)
        if self._completions:
            self.completed = await calls.complete(self._connection, self.hot.agent_id, self._completions)
            if len(self.completed) != len(self._completions):
                raise RuntimeError("a call was completed twice under the lock of its agent")
        if created_at is None:
            return []
        return [
            EventRow(e.sequence, e.id, e.kind, e.turn_id, e.turn_sequence, e.is_opening, e.payload, created_at)
            for e in self._events
        ]

    def _add(self, kind: str, payload: Payload, *, opening: bool, semantic: bool) -> NewEventRow:
        if self.hot.turn_id is None:
            raise RuntimeError("an event needs a turn")
        event = NewEventRow(
            self.hot.next_sequence,
            new_uuid(),
            kind,
            self.hot.turn_id,
            self.hot.turn_sequence,
            opening,
            semantic,
            encode_payload(payload),
        )
        self.hot.next_sequence += 1
        self._events.append(event)
        return event


def wake_if_runnable(hot: HotRow) -> Wake:
    """Wake an agent unless calls are still open: whoever completes the last one wakes it (engine.md, trap 5)."""
    return "keep" if hot.open_calls > 0 else "wake"
