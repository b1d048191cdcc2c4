"""What travels from a running step to an open stream, and the queue of one stream.

A queue is bounded, and everything in it can be done without: deltas and state changes are previews, and a durable
event that does not fit is read from the log instead. So a slow client costs memory up to a limit and nothing else.
Source: DESIGN §6; field-reports B31, B32.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final
from uuid import UUID

import msgspec

from omnara.domain.events import Event
from omnara.domain.stream import StreamDelta, TextDelta, ThinkingDelta, ToolArgumentsDelta

MAX_PREVIEWS: Final = 1024
"""Deltas and state changes that wait for one client; then all of them are dropped."""
MAX_PREVIEW_BYTES: Final = 256 * 1024
MAX_DURABLE: Final = 64
"""Events handed over in memory that wait for one client; then they are read from the log."""
MERGE_FROM: Final = 16
"""From so many waiting items on a client counts as slow, and neighbouring deltas are merged."""
MERGE_BYTES: Final = 8 * 1024
"""The longest text that merging makes."""

_ENCODER: Final = msgspec.json.Encoder()
_TEXTS: Final = (TextDelta, ThinkingDelta, ToolArgumentsDelta)
_KINDS: Final = {TextDelta: "text_delta", ThinkingDelta: "thinking_delta", ToolArgumentsDelta: "tool_arguments_delta"}


class ModelDelta(msgspec.Struct, frozen=True):
    """One delta as a model step publishes it. Ids are public; `seq` counts 1, 2, 3, … within the model call."""

    turn_id: str
    model_call_context_id: str
    seq: int
    event: StreamDelta


class Delta(msgspec.Struct, gc=False):
    """A run of one or more neighbouring deltas. `frame` is a place where the encoded form is kept between readers.

    `text` holds the words of a kind that can be merged; every other kind is in `raw`, as JSON.
    """

    turn_id: str
    call_id: str
    first: int
    last: int
    count: int
    kind: str = ""
    block_index: int = 0
    text: str | None = None
    raw: bytes = b""
    frame: bytes | None = None

    @classmethod
    def of(cls, delta: ModelDelta) -> Delta:
        """Return the run of one that holds `delta`."""
        event = delta.event
        seq = delta.seq
        if isinstance(event, _TEXTS):
            kind = _KINDS[type(event)]
            return cls(delta.turn_id, delta.model_call_context_id, seq, seq, 1, kind, event.block_index, event.delta)
        return cls(delta.turn_id, delta.model_call_context_id, seq, seq, 1, raw=_ENCODER.encode(event))

    @property
    def size(self) -> int:
        """Roughly how many bytes it holds."""
        return len(self.raw) if self.text is None else len(self.text)

    def event_json(self) -> bytes:
        """Return the delta object as JSON."""
        if self.text is None:
            return self.raw
        return _ENCODER.encode({"kind": self.kind, "block_index": self.block_index, "delta": self.text})

    def joined(self, later: Delta) -> Delta | None:
        """Return one run for this and the next delta, or None when they are not neighbours of one kind and block."""
        if self.text is None or later.text is None or self.kind != later.kind or self.block_index != later.block_index:
            return None
        if self.call_id != later.call_id or self.last + 1 != later.first:
            return None
        text = self.text + later.text
        if len(text) > MERGE_BYTES:
            return None
        count = self.count + later.count
        return Delta(self.turn_id, self.call_id, self.first, later.last, count, self.kind, self.block_index, text)


class Durable(msgspec.Struct):
    """A committed event, handed over in memory."""

    event: Event
    frame: bytes | None = None


class CallState(msgspec.Struct):
    """A tool call changed its state."""

    call_id: UUID
    state: str
    frame: bytes | None = None


Item = Delta | Durable | CallState


class Batch(msgspec.Struct, frozen=True):
    """Everything that waited for a stream. `behind`: the log has events that are not among the items."""

    items: list[Item]
    behind: bool
    closed: bool


class Subscription:
    """One stream's queue. Written by the feed, read by exactly one task; both in the same event loop.

    While that task waits, somebody else may empty the queue in its place (`attach`, `take_items`).
    """

    __slots__ = (
        "_announced", "_arrived", "_behind", "_bytes", "_closed", "_durable", "_items", "_next", "_waiter", "agent_id",
        "wants_deltas",
    )  # fmt: skip

    def __init__(self, agent_id: UUID, *, wants_deltas: bool, next_sequence: int) -> None:
        self.agent_id = agent_id
        self.wants_deltas = wants_deltas
        self._next = next_sequence
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._durable = 0
        self._behind = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._arrived: Callable[[], None] | None = None
        self._announced = False

    @property
    def idle(self) -> bool:
        """True while the reading task waits, and nothing but items could wake it."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def closed(self) -> bool:
        """True once the stream is to end."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Items in the queue, for tests and metrics."""
        return len(self._items)

    async def wait(self) -> None:
        """Return when there is something to take. The feed's owner wakes every stream for its heartbeat."""
        if self._items or self._behind or self._closed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def attach(self, arrived: Callable[[], None] | None) -> None:
        """From now on an item that arrives does not wake the task: `arrived` is called, once until the queue is taken.
        None: the task is woken again.

        It must not raise, and whoever is told either takes the items or calls `tick`.
        """
        self._arrived = arrived

    def take(self) -> Batch:
        """Return all that waits and empty the queue. Never blocks; may be empty."""
        behind, self._behind = self._behind, False
        return Batch(self.take_items(), behind, self._closed)

    def take_items(self) -> list[Item]:
        """Return the items that wait and empty the queue; whether the log has more is left for the task."""
        items = list(self._items)
        self._items.clear()
        self._bytes = self._durable = 0
        self._announced = False
        return items

    def reached(self, sequence: int) -> None:
        """Tell that the reader has everything up to `sequence`, so that the next event may come in memory."""
        self._next = max(self._next, sequence + 1)

    def tick(self) -> None:
        """Wake the reader without giving it anything."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Tell that the log may have news."""
        self._behind = True
        self.tick()

    def close(self) -> None:
        """Ask the reader to end the stream after what is in the queue."""
        self._closed = True
        self.tick()

    def offer(self, durable: Durable) -> None:
        """Queue an event if it is the next one; otherwise the reader looks into the log. Known ones are ignored."""
        sequence = durable.event.sequence
        if sequence < self._next:
            return
        if self._behind or sequence > self._next or self._durable >= MAX_DURABLE:
            self.wake()
            return
        self._next = sequence + 1
        self._durable += 1
        self._items.append(durable)
        self._tell()

    def preview(self, item: Delta | CallState) -> None:
        """Queue a delta or a state change: merged with its neighbour for a slow client, dropped if it does not fit."""
        size = 32
        if isinstance(item, Delta):
            size += item.size
            if len(self._items) >= MERGE_FROM and self._merged(item):
                self._bytes += item.size
                return
        if self._bytes + size > MAX_PREVIEW_BYTES or len(self._items) >= MAX_PREVIEWS:
            self._drop_previews()
            return
        self._bytes += size
        self._items.append(item)
        self._tell()

    def _tell(self) -> None:
        if self._arrived is None:
            self.tick()
        elif not self._announced:
            self._announced = True
            self._arrived()

    def _merged(self, item: Delta) -> bool:
        last = self._items[-1]
        joined = last.joined(item) if isinstance(last, Delta) else None
        if joined is None:
            return False
        self._items[-1] = joined
        return True

    def _drop_previews(self) -> None:
        kept = [item for item in self._items if isinstance(item, Durable)]
        self._items.clear()
        self._items.extend(kept)
        self._bytes = 0
