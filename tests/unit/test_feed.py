"""The feed: order, bounds and merging of what waits for one stream, and the link between replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

import pytest

from omnara.clock import Deadline, poll_until
from omnara.db.bus import Hint, Kind, LocalBus
from omnara.domain.content import TextBlock
from omnara.domain.events import AgentInputPayload, Event, EventMeta
from omnara.domain.stream import BlockStop, StreamDelta, TextDelta, ThinkingDelta
from omnara.engine import feed as feed_module
from omnara.engine.feed import Feed, ModelDelta
from omnara.engine.feed_items import MAX_DURABLE, MAX_PREVIEWS, MERGE_FROM, CallState, Delta, Durable
from omnara.engine.feed_remote import MAX_OUTBOX_BYTES, FeedLink, unpack
from omnara.ids import new_uuid

AGENT = new_uuid()


def event(sequence: int) -> Event:
    payload = AgentInputPayload("ain_x", "content", [TextBlock("hi")])
    return Event(
        sequence, new_uuid(), "agent_input", new_uuid(), 1, False, payload, EventMeta(), None, datetime.now(UTC)
    )


def text(seq: int, words: str = "a", *, block: int = 0, call: str = "mcc_1") -> ModelDelta:
    return ModelDelta("trn_1", call, seq, TextDelta(block, words))


def sequences(items: Iterable[object]) -> list[int]:
    return [item.event.sequence for item in items if isinstance(item, Durable)]


async def test_events_arrive_in_memory_only_in_order() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=False, next_sequence=3)
    feed.events(AGENT, [event(2), event(3), event(4)])
    batch = reader.take()
    assert sequences(batch.items) == [3, 4]
    assert not batch.behind
    feed.events(AGENT, [event(6)])
    batch = reader.take()
    assert batch.items == []
    assert batch.behind, "a gap sends the reader to the log"
    reader.reached(6)
    feed.events(AGENT, [event(7)])
    assert sequences(reader.take().items) == [7]


async def test_after_a_wake_events_are_read_and_not_queued() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=False)
    feed.wake(AGENT)
    feed.events(AGENT, [event(1)])
    batch = reader.take()
    assert batch.items == []
    assert batch.behind


async def test_a_watcher_hears_of_every_agent_once() -> None:
    """Of agents without a reader as well; not of the echo of what this process said itself."""
    feed = Feed()
    heard: list[object] = []
    feed.watch(heard.append)
    feed.events(AGENT, [event(1)])
    feed.receive_hint(AGENT)
    assert heard == [AGENT]
    other = new_uuid()
    feed.wake(AGENT)
    feed.receive_hint(other)
    feed.wake_all()
    assert heard == [AGENT, AGENT, other, None]
    feed.unwatch(heard.append)
    feed.events(AGENT, [event(2)])
    feed.wake_all()
    assert len(heard) == 4


async def test_only_readers_that_want_deltas_get_them() -> None:
    feed = Feed()
    plain = feed.subscribe(AGENT, deltas=False)
    assert not feed.wants_deltas(AGENT)
    keen = feed.subscribe(AGENT, deltas=True)
    assert feed.wants_deltas(AGENT)
    feed.delta(AGENT, text(1))
    feed.tool_call(AGENT, new_uuid(), "ready")
    assert [type(item) for item in plain.take().items] == [CallState]
    assert [type(item) for item in keen.take().items] == [Delta, CallState]
    feed.unsubscribe(keen)
    feed.unsubscribe(keen)
    assert not feed.wants_deltas(AGENT)
    feed.unsubscribe(plain)
    assert feed.local_agents() == {}


async def test_neighbours_are_merged_for_a_slow_reader() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=True)
    for seq in range(1, MERGE_FROM + 11):
        feed.delta(AGENT, text(seq))
    items = [item for item in reader.take().items if isinstance(item, Delta)]
    assert len(items) == MERGE_FROM
    merged = items[-1]
    assert (merged.first, merged.last, merged.count) == (MERGE_FROM, MERGE_FROM + 10, 11)
    assert merged.text == "a" * 11
    assert sum(item.count for item in items) == MERGE_FROM + 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (text(1), text(3)),
        (text(1), text(2, block=1)),
        (text(1), text(2, call="mcc_2")),
        (text(1), ModelDelta("trn_1", "mcc_1", 2, ThinkingDelta(0, "b"))),
        (text(1), ModelDelta("trn_1", "mcc_1", 2, BlockStop(0))),
        (ModelDelta("trn_1", "mcc_1", 1, BlockStop(0)), text(2)),
        (text(1, "x" * 8000), text(2, "y" * 8000)),
    ],
)
async def test_what_is_not_a_neighbour_is_not_merged(one: ModelDelta, other: ModelDelta) -> None:
    assert Delta.of(one).joined(Delta.of(other)) is None


async def test_a_stalled_reader_costs_bounded_memory_and_loses_no_event() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=True)
    feed.events(AGENT, [event(sequence) for sequence in range(1, 4)])
    for seq in range(1, 5 * MAX_PREVIEWS):
        feed.delta(AGENT, ModelDelta("trn_1", "mcc_1", seq, BlockStop(seq)))
        assert reader.waiting <= MAX_PREVIEWS
    assert sequences(reader.take().items) == [1, 2, 3], "previews are dropped, events are not"
    feed.events(AGENT, [event(sequence) for sequence in range(4, 4 + 2 * MAX_DURABLE)])
    batch = reader.take()
    assert sequences(batch.items) == list(range(4, 4 + MAX_DURABLE))
    assert batch.behind, "what did not fit is read from the log"


async def test_large_deltas_are_bounded_in_bytes() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=True)
    held = 0
    for seq in range(1, 200):
        feed.delta(AGENT, text(seq, "x" * 5000))
        held = max(held, sum(item.size for item in reader._items if isinstance(item, Delta)))
    assert held <= 256 * 1024


async def test_wait_returns_for_every_reason() -> None:
    feed = Feed()
    reader = feed.subscribe(AGENT, deltas=True)
    for act in (
        lambda: feed.delta(AGENT, text(1)),
        lambda: feed.wake_all(),
        lambda: reader.tick(),
        lambda: feed.events(AGENT, [event(1)]),
        lambda: reader.close(),
    ):
        waiting = asyncio.create_task(reader.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        act()
        await asyncio.wait_for(waiting, 20)
        reader.take()
    assert reader.closed


# --- between replicas -------------------------------------------------------------------------------------


class Wire:
    """Two processes' buses, joined: what one sender says, the other bus hears, as the real sender and listener do."""

    def __init__(self, own: LocalBus) -> None:
        self.own = own
        self.peers: list[LocalBus] = []
        self.texts: list[str] = []

    def subscribers(self, agent_ids: Iterable[str]) -> None:
        hint = Hint(Kind.SUBSCRIBERS, tuple(agent_ids))
        for bus in (self.own, *self.peers):
            bus.publish(hint)

    def delta(self, agent_id: str, text: str) -> None:
        self.texts.append(text)
        for bus in self.peers:
            bus.publish(Hint(Kind.DELTAS, (agent_id,), text))


class Replica:
    def __init__(self) -> None:
        self.bus = LocalBus()
        self.wire = Wire(self.bus)
        self.feed = Feed()
        self.link = FeedLink(self.feed, self.wire, self.bus)


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[Replica, Replica]]:
    one, two = Replica(), Replica()
    one.wire.peers, two.wire.peers = [two.bus], [one.bus]
    for replica in (one, two):
        await replica.link.start()
    yield one, two
    for replica in (one, two):
        await replica.link.drain(Deadline(0))
        await replica.link.stop()


async def until(condition: object) -> None:
    assert callable(condition)

    async def check() -> bool:
        return bool(condition())

    assert await poll_until(check, within_s=20, every_s=0.005)


async def test_deltas_cross_only_to_where_they_are_wanted(replicas: tuple[Replica, Replica]) -> None:
    worker, front = replicas
    worker.feed.delta(AGENT, text(1))
    assert not worker.feed.wants_deltas(AGENT)
    reader = front.feed.subscribe(AGENT, deltas=True)
    await until(lambda: worker.feed.wants_deltas(AGENT))
    assert not worker.feed.wants_deltas(new_uuid())
    for seq in range(1, 6):
        worker.feed.delta(AGENT, text(seq, f"w{seq} "))
    call_id = new_uuid()
    worker.feed.tool_call(AGENT, call_id, "running")
    await until(lambda: reader.waiting >= 2)
    delta, state = reader.take().items
    assert isinstance(delta, Delta)
    assert (delta.first, delta.last, delta.count) == (1, 5, 5)
    assert delta.text == "w1 w2 w3 w4 w5 "
    assert isinstance(state, CallState)
    assert (state.call_id, state.state) == (call_id, "running")


async def test_a_reader_without_deltas_gets_states_only(replicas: tuple[Replica, Replica]) -> None:
    worker, front = replicas
    reader = front.feed.subscribe(AGENT, deltas=False)
    await until(lambda: AGENT in worker.feed._remote)
    assert not worker.feed.wants_deltas(AGENT)
    worker.feed.tool_call(AGENT, new_uuid(), "ready")
    await until(lambda: reader.waiting == 1)


async def test_own_announcements_do_not_come_back(replicas: tuple[Replica, Replica]) -> None:
    worker, front = replicas
    front.feed.subscribe(AGENT, deltas=True)
    await until(lambda: worker.feed.wants_deltas(AGENT))
    assert AGENT not in front.feed._remote
    front.feed.delta(AGENT, text(1))
    await asyncio.sleep(0.05)
    assert front.wire.texts == []


async def test_interest_ends_when_it_is_not_repeated(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = replicas
    worker.feed.receive_interest([(AGENT, True)])
    assert worker.feed.wants_deltas(AGENT)
    later = feed_module.monotonic() + 16
    monkeypatch.setattr(feed_module, "monotonic", lambda: later)
    assert not worker.feed.wants_deltas(AGENT)
    worker.feed.forget_expired()
    assert not worker.feed._remote


async def test_event_hints_wake_readers_and_nonsense_is_ignored(replicas: tuple[Replica, Replica]) -> None:
    _, front = replicas
    reader = front.feed.subscribe(AGENT, deltas=True)
    for bad in ("", "not an id", "агент"):
        front.bus.publish(Hint(Kind.EVENTS, (bad,)))
        front.bus.publish(Hint(Kind.DELTAS, (bad,), "{"))
    front.bus.publish(Hint(Kind.DELTAS, (str(AGENT),), "[1,2"))
    front.bus.publish(Hint(Kind.EVENTS, (str(AGENT),)))
    await until(lambda: reader.take().behind)
    front.bus.look_again()
    await until(lambda: reader.take().behind)


async def test_the_echo_of_an_own_hint_reads_nothing(
    replicas: tuple[Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, front = replicas
    now = feed_module.monotonic()
    monkeypatch.setattr(feed_module, "monotonic", lambda: now)
    reader = front.feed.subscribe(AGENT, deltas=False)
    front.feed.events(AGENT, [event(1)])
    front.bus.publish(Hint(Kind.EVENTS, (str(AGENT),)))
    await asyncio.sleep(0.01)
    batch = reader.take()
    assert sequences(batch.items) == [1]
    assert not batch.behind
    front.bus.publish(Hint(Kind.EVENTS, (str(AGENT),)))
    await until(lambda: reader.take().behind)
    front.feed.events(AGENT, [event(2)])
    reader.take()
    later = now + 1
    monkeypatch.setattr(feed_module, "monotonic", lambda: later)
    front.bus.publish(Hint(Kind.EVENTS, (str(AGENT),)))
    await until(lambda: reader.take().behind)


async def test_parcels_fit_the_bus() -> None:
    feed = Feed()
    feed.receive_interest([(AGENT, True)])
    events: list[StreamDelta] = [TextDelta(0, "ü" * 2000), TextDelta(0, '\\"' * 1000), BlockStop(1)]
    for seq in range(1, 31):
        feed.delta(AGENT, ModelDelta("trn_" + "a" * 26, "mcc_" + "b" * 26, seq, events[seq % 3]))
        feed.tool_call(AGENT, new_uuid(), "awaiting_permission")
    parcels = list(feed.outbox.take_parcels())
    assert all(len(parcel.encode()) <= 7000 for _, parcel in parcels)
    news = [item.item for _, parcel in parcels for item in unpack(AGENT, parcel)]
    assert sum(item.count for item in news if isinstance(item, Delta)) == 30, "merging loses nothing"
    assert sum(isinstance(item, CallState) for item in news) == 30


async def test_outbox_is_bounded() -> None:
    feed = Feed()
    feed.receive_interest([(AGENT, True)])
    for seq in range(1, 200):
        feed.delta(AGENT, text(2 * seq, "x" * 4000))
    total = sum(len(parcel) for _, parcel in feed.outbox.take_parcels())
    assert total < MAX_OUTBOX_BYTES * 1.2


async def test_items_are_announced_once_until_they_are_taken_and_the_task_sleeps_on() -> None:
    feed, told = Feed(), list[str]()
    reader = feed.subscribe(AGENT, deltas=True)
    reader.attach(lambda: told.append("arrived"))
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    assert reader.idle
    feed.delta(AGENT, text(1))
    feed.events(AGENT, [event(1)])
    feed.tool_call(AGENT, new_uuid(), "running")
    assert told == ["arrived"]
    kinds = [type(item) for item in reader.take_items()]
    assert kinds == [Delta, Durable, CallState], "in the order in which they came"
    feed.delta(AGENT, text(2))
    assert told == ["arrived"] * 2
    await asyncio.sleep(0)
    assert reader.idle
    feed.events(AGENT, [event(3)])
    await waiting
    batch = reader.take()
    assert batch.behind, "a gap in the log is for the task"
    assert len(batch.items) == 1
    reader.attach(None)
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    feed.delta(AGENT, text(3))
    await asyncio.wait_for(waiting, 20)
    assert told == ["arrived"] * 2
