"""The feed's link to other replicas: says what is read here, and carries previews to where they are read.

It speaks over the bus's hints and follows its rules: ids may repeat, anything may be lost, a delta is opaque text of
limited size. A process without other replicas sends a few announcements per stream and no delta at all.
Source: DESIGN §3 (Hints), §6; field-reports B50.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

import msgspec

from omnara.clock import Deadline
from omnara.db.bus import Batch, Kind, LocalBus
from omnara.db.hintwire import DELTA_LIMIT
from omnara.engine.feed_items import CallState, Delta
from omnara.service import Tasks

if TYPE_CHECKING:
    from omnara.engine.feed import Feed

ANNOUNCE_S: Final = 5.0
"""A third of the time that an announcement counts, so that two may be lost."""
FLUSH_S: Final = 0.02
"""Deltas gather for so long before they travel; the bus adds 5 to 50 ms of its own."""
MAX_OUTBOX_BYTES: Final = 128 * 1024
"""Previews that wait for one flush; further ones are dropped."""
MAX_RUN_BYTES: Final = DELTA_LIMIT - 512
"""The largest run that travels, in bytes of its JSON without the envelope; a bigger one is dropped."""
_WITH_DELTAS: Final = "/deltas"


class HintSink(Protocol):
    """What the link needs of the bus's sender."""

    def subscribers(self, agent_ids: Iterable[str]) -> None:
        """Tell other replicas that these agents are read here."""

    def delta(self, agent_id: str, text: str) -> None:
        """Send opaque text to the other replicas' readers of one agent."""


class RemoteNews(msgspec.Struct, frozen=True):
    """A preview that a step in another replica published."""

    agent_id: UUID
    item: Delta | CallState


class _Run(msgspec.Struct, array_like=True):
    turn_id: str
    call_id: str
    first: int
    last: int
    count: int
    kind: str
    block_index: int
    text: str | None
    raw: str


class _State(msgspec.Struct, array_like=True):
    call_id: UUID
    state: str


class _Parcel(msgspec.Struct, array_like=True):
    runs: list[_Run]
    states: list[_State]


_PARCELS: Final = msgspec.json.Decoder(_Parcel)
_ENCODER: Final = msgspec.json.Encoder()


class Outbox:
    """What is to be told to other replicas. Bounded; filled by the feed, emptied by the link."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._announced: dict[UUID, bool] = {}
        self._runs: dict[UUID, list[tuple[Delta, int]]] = {}
        self._states: dict[UUID, list[CallState]] = {}
        self._bytes = 0

    def announce(self, agent_id: UUID, *, deltas: bool) -> None:
        """Tell soon that this agent has a reader here."""
        self._announced[agent_id] = deltas or self._announced.get(agent_id, False)
        self.filled.set()

    def delta(self, agent_id: UUID, run: Delta) -> None:
        """Send a run, merged with its neighbours. Dropped when too much waits or when it is too big to travel."""
        # Escapes and multi-byte characters count as what they become: the bus's limit is in bytes.
        cost = len(run.raw) if run.text is None else len(_ENCODER.encode(run.text))
        if self._bytes + cost > MAX_OUTBOX_BYTES or cost > MAX_RUN_BYTES:
            return
        runs = self._runs.setdefault(agent_id, [])
        last, last_cost = runs[-1] if runs else (None, 0)
        joined = last.joined(run) if last is not None and last_cost + cost <= MAX_RUN_BYTES else None
        if joined is not None:
            runs[-1] = (joined, last_cost + cost)
        else:
            runs.append((run, cost))
        self._bytes += cost
        self.filled.set()

    def call_state(self, agent_id: UUID, change: CallState) -> None:
        """Send a tool call's new state. Dropped when too much waits."""
        if self._bytes + 64 > MAX_OUTBOX_BYTES:
            return
        self._states.setdefault(agent_id, []).append(change)
        self._bytes += 64
        self.filled.set()

    def take_announcements(self) -> dict[UUID, bool]:
        """Return and forget what is to be announced."""
        announced, self._announced = self._announced, {}
        return announced

    def take_parcels(self) -> Iterator[tuple[UUID, str]]:
        """Return and forget what is to be sent, as texts that fit the bus."""
        runs, self._runs = self._runs, {}
        states, self._states = self._states, {}
        self._bytes = 0
        for agent_id in runs.keys() | states.keys():
            for text in _pack([run for run, _ in runs.get(agent_id, [])], states.get(agent_id, [])):
                yield agent_id, text


def _pack(runs: list[Delta], states: list[CallState]) -> Iterator[str]:
    """Yield texts below the bus's limit."""
    parcel, size = _Parcel([], []), 0
    entries: list[_Run | _State] = [
        *(_wire_run(run) for run in runs),
        *(_State(state.call_id, state.state) for state in states),
    ]
    for entry in entries:
        cost = len(_ENCODER.encode(entry)) + 1
        if size and size + cost > DELTA_LIMIT - 64:
            yield _ENCODER.encode(parcel).decode()
            parcel, size = _Parcel([], []), 0
        if isinstance(entry, _Run):
            parcel.runs.append(entry)
        else:
            parcel.states.append(entry)
        size += cost
    if size:
        yield _ENCODER.encode(parcel).decode()


def _wire_run(run: Delta) -> _Run:
    return _Run(
        run.turn_id,
        run.call_id,
        run.first,
        run.last,
        run.count,
        run.kind,
        run.block_index,
        run.text,
        run.raw.decode(),
    )


def unpack(agent_id: UUID, text: str) -> list[RemoteNews]:
    """Read what another replica packed. Raises `msgspec.DecodeError` on anything else."""
    parcel = _PARCELS.decode(text)
    news = [
        RemoteNews(
            agent_id,
            Delta(r.turn_id, r.call_id, r.first, r.last, r.count, r.kind, r.block_index, r.text, r.raw.encode()),
        )
        for r in parcel.runs
    ]
    return news + [RemoteNews(agent_id, CallState(state.call_id, state.state)) for state in parcel.states]


class FeedLink:
    """The service that connects a feed with the bus: announces, sends, receives. One per process."""

    name = "feed"

    def __init__(self, feed: Feed, sender: HintSink, bus: LocalBus) -> None:
        self._feed = feed
        self._sender = sender
        self._bus = bus
        self._tasks = Tasks()

    async def start(self) -> None:
        """Begin to send and receive."""
        self._interests = self._bus.subscribe([Kind.SUBSCRIBERS])
        self._news = self._bus.subscribe([Kind.EVENTS, Kind.DELTAS])
        self._tasks.spawn(self._send(), "feed-send")
        self._tasks.spawn(self._announce(), "feed-announce")
        self._tasks.spawn(self._receive_interests(), "feed-interests")
        self._tasks.spawn(self._receive_news(), "feed-news")

    async def watch(self) -> None:
        """Wait until a part of the link fails, and raise its error."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish: everything here may be lost."""

    async def stop(self) -> None:
        """End all of it."""
        await self._tasks.close()
        for subscription in (getattr(self, "_interests", None), getattr(self, "_news", None)):
            if subscription is not None:
                subscription.close()

    async def _send(self) -> None:
        outbox = self._feed.outbox
        while True:
            await outbox.filled.wait()
            self._tell(outbox.take_announcements())
            await asyncio.sleep(FLUSH_S)
            outbox.filled.clear()
            self._tell(outbox.take_announcements())
            for agent_id, text in outbox.take_parcels():
                self._sender.delta(str(agent_id), text)

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            self._tell(self._feed.local_agents())
            self._feed.forget_expired()

    def _tell(self, agents: dict[UUID, bool]) -> None:
        if not agents:
            return
        # The sender also tells this process's own bus. No await lies between the two takes, so what the second one
        # throws away is our own voice and nothing else.
        self._note_interests(self._interests.take())
        self._sender.subscribers(f"{agent_id}{_WITH_DELTAS if deltas else ''}" for agent_id, deltas in agents.items())
        self._interests.take()

    async def _receive_interests(self) -> None:
        while True:
            self._note_interests(await self._interests.get())

    def _note_interests(self, batch: Batch) -> None:
        self._feed.receive_interest(_interests(batch.ids.get(Kind.SUBSCRIBERS, frozenset())))

    async def _receive_news(self) -> None:
        while True:
            batch = await self._news.get()
            if Kind.EVENTS in batch.everything:
                self._feed.wake_all()
            for text in batch.ids.get(Kind.EVENTS, frozenset()):
                if (agent_id := _agent(text)) is not None:
                    self._feed.receive_hint(agent_id)
            for hint in batch.deltas:
                if (agent_id := _agent(hint.ids[0])) is not None:
                    self._feed.receive_news(_readable(agent_id, hint.text))


def _readable(agent_id: UUID, text: str) -> list[RemoteNews]:
    # Another release may pack differently; a preview that cannot be read is a lost preview.
    try:
        return unpack(agent_id, text)
    except msgspec.DecodeError:
        return []


def _interests(ids: Iterable[str]) -> Iterator[tuple[UUID, bool]]:
    for text in ids:
        agent_id = _agent(text.removesuffix(_WITH_DELTAS))
        if agent_id is not None:
            yield agent_id, text.endswith(_WITH_DELTAS)


def _agent(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
