"""Folded conversations kept between steps: a bounded LRU, so that a step costs its new events and not its history.

An entry is never trusted blindly: the log is read from the entry's last sequence *inclusive* and the id of that
event is compared, since a failover can rewrite the tail; a changed `history_version` drops the entry.
Source: DESIGN §4 "Cost per step"; coordination §8.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

from omnara.db.compaction import last_checkpoint
from omnara.db.connection import Connection
from omnara.db.snapshot import EVENT_PAGE, decode_event, read_events
from omnara.domain.claim import Claim
from omnara.domain.context import ContextState
from omnara.domain.events import DamagedEvent, Event
from omnara.providers.rendered import RenderedHistory
from omnara.tools.registry import SHOWN_CHARS

LONG_LOG: Final = 200
"""Events that are read without looking for a checkpoint first: fewer are not worth the question."""


class DamagedLog(Exception):
    """Rows of an agent cannot be used. `void` holds half-open ranges of the sequences concerned, if it is the log's."""

    def __init__(self, sequences: Sequence[int], reason: str) -> None:
        self.void = tuple((sequence, sequence + 1) for sequence in sequences)
        super().__init__(reason)


class CachedContext:
    """One agent's conversation up to `context.sequence`, its rendered bytes, and the id of its last event."""

    __slots__ = ("_head", "context", "history", "history_version", "last_id", "void")

    def __init__(self, claim: Claim) -> None:
        # The fold takes ranges with both ends included, the hot row half-open ones.
        self.void = tuple((low, high - 1) for low, high in claim.void)
        self.context = ContextState(self.void, SHOWN_CHARS)
        self.history = RenderedHistory()
        self.history_version = claim.history_version
        self.last_id: UUID | None = None
        self._head = claim.next_sequence - 1

    @property
    def sequence(self) -> int:
        """The last sequence that is folded in."""
        return self.context.sequence

    @property
    def bytes_size(self) -> int:
        """Estimated memory."""
        return self.context.bytes_size + self.history.bytes_size

    def follow(self, events: Sequence[Event]) -> None:
        """Fold events in that directly follow; anything else is left for the next read of the log."""
        for event in events:
            if event.sequence != self.context.sequence + 1:
                return
            self.context.apply(event)
            self.last_id = event.id

    def absorb(self, rows: Sequence[object]) -> bool:
        """Fold rows of the log that start at `next_read`. False when they do not fit, or one is damaged or missing.

        After False the entry may have a hole: throw it away, and `catch_up` a new one, which says what is wrong.
        """
        if self.last_id is not None:
            if not rows or rows[0][0] != self.context.sequence or rows[0][1] != self.last_id:  # type: ignore[index]
                return False
            rows = rows[1:]
        damaged: list[DamagedEvent] = []
        self._fold_rows(rows, damaged)
        return not damaged

    @property
    def next_read(self) -> int:
        """Where the log is to be read from: the last known event inclusive, to see whether it still is the one.

        Of a long log that is not known at all, nothing: `caught_up` looks for a checkpoint to start at first.
        """
        if self.last_id is None and self.context.sequence == 0 and self._head > LONG_LOG:
            return self._head + 1
        return self._start

    @property
    def _start(self) -> int:
        return self.context.sequence + (self.last_id is None)

    async def start_at_checkpoint(self, connection: Connection, agent_id: UUID, head: int) -> None:
        """Begin an empty entry with the newest checkpoint up to `head` that is valid, if the log is long and has one.

        A damaged one is left to the reading of the whole log, which says so.
        """
        if self.last_id is not None or self.context.sequence or head <= LONG_LOG:
            return
        while (row := await last_checkpoint(connection, agent_id, head)) is not None:
            if not self._is_void(row[0]):
                with suppress(DamagedEvent):
                    self.context.start_after(decode_event(row))
                return
            head = row[0] - 1

    async def catch_up(self, connection: Connection, agent_id: UUID, head: int) -> bool:
        """Read the log from the last known event on, up to `head` and no further. False when the entry is stale.

        Events after `head` were not there when the step began: they belong to the next one. Raises DamagedLog when a
        row does not decode, or rows are missing.
        """
        damaged: list[DamagedEvent] = []
        while self.context.sequence < head or self.last_id is not None:
            start = self._start
            limit = min(EVENT_PAGE, head - start + 1)
            rows = await read_events(connection, agent_id, start, limit) if limit > 0 else []
            rows = [row for row in rows if row[0] <= head]  # where rows are missing, others came in their place
            if self.last_id is not None:
                if not rows or rows[0][0] != self.context.sequence or rows[0][1] != self.last_id:
                    return False
                rows = rows[1:]
            self._fold_rows(rows, damaged)
            if self.context.sequence >= head:
                break
            if not rows:
                damaged += self._missing(head + 1)
                self.context.sequence = head
                break
        if damaged:
            raise DamagedLog([error.sequence for error in damaged], str(damaged[0]))
        return True

    def _fold_rows(self, rows: Sequence[object], damaged: list[DamagedEvent]) -> None:
        for row in rows:
            sequence: int = row[0]  # type: ignore[index]
            damaged += self._missing(sequence)
            if self._is_void(sequence):
                self.context.sequence = sequence
            else:
                try:
                    self.context.apply(decode_event(row))  # type: ignore[arg-type]
                except DamagedEvent as error:
                    damaged.append(error)
                    self.context.sequence = sequence
            self.last_id = row[1]  # type: ignore[index]

    def _missing(self, until: int) -> list[DamagedEvent]:
        gap = range(self.context.sequence + 1, until)
        return [DamagedEvent(sequence, "the row is missing") for sequence in gap if not self._is_void(sequence)]

    def _is_void(self, sequence: int) -> bool:
        return any(low <= sequence <= high for low, high in self.void)


async def caught_up(connection: Connection, claim: Claim, entry: CachedContext, frontier: int) -> CachedContext:
    """Return an entry that reaches exactly `frontier`: the given one, or a new one when the log's tail was rewritten.

    Raises DamagedLog; RuntimeError when the log does not end where the step says, which is a fault of ours.
    """
    await entry.start_at_checkpoint(connection, claim.agent_id, frontier)
    if not await entry.catch_up(connection, claim.agent_id, frontier):
        entry = CachedContext(claim)
        await entry.start_at_checkpoint(connection, claim.agent_id, frontier)
        await entry.catch_up(connection, claim.agent_id, frontier)
    if entry.sequence != frontier:
        raise RuntimeError(f"the log reaches {entry.sequence}, the step may see {frontier}")
    return entry


class ContextCache:
    """LRU by bytes. `take` removes the entry for the time of a run; `put` gives it back and evicts the oldest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[UUID, CachedContext] = OrderedDict()
        self._bytes = 0
        self.hits = 0
        self.misses = 0

    def take(self, claim: Claim) -> CachedContext:
        """Return the agent's entry if it fits the claim's history version, else an empty one."""
        entry = self._entries.pop(claim.agent_id, None)
        if entry is not None:
            self._bytes -= entry.bytes_size
            if entry.history_version == claim.history_version:
                self.hits += 1
                return entry
        self.misses += 1
        return CachedContext(claim)

    def put(self, agent_id: UUID, entry: CachedContext) -> None:
        """Keep an entry; the least recently used ones go when the bound is passed."""
        self._entries[agent_id] = entry
        self._bytes += entry.bytes_size
        while self._bytes > self._max_bytes and self._entries:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= evicted.bytes_size
