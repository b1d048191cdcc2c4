"""The in-process bus and the wire format of hints: nothing grows without bound, nothing is over the limit."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnara.db.bus import Batch, Hint, Kind, LocalBus
from omnara.db.hintwire import DELTA_LIMIT, decode, encode

ID_KINDS = [kind for kind in Kind if kind is not Kind.DELTAS]


async def test_hints_coalesce_until_taken() -> None:
    bus = LocalBus()
    with bus.subscribe([Kind.READY, Kind.CANCEL]) as subscription:
        bus.publish(Hint(Kind.READY, ("a", "b")))
        bus.publish(Hint(Kind.READY, ("b",)))
        bus.publish(Hint(Kind.CANCEL, ("c",)))
        bus.publish(Hint(Kind.EVENTS, ("d",)))
        batch = await subscription.get()
        assert batch.ids == {Kind.READY: {"a", "b"}, Kind.CANCEL: {"c"}}
        assert batch.wants(Kind.READY, "a")
        assert not batch.wants(Kind.READY, "c")
        assert subscription.take() == Batch({}, frozenset(), (), 0)


async def test_a_keyed_subscriber_hears_of_its_agent_only() -> None:
    bus = LocalBus()
    mine = bus.subscribe([Kind.EVENTS, Kind.DELTAS], key="a")
    bus.publish(Hint(Kind.EVENTS, ("b", "c")))
    assert mine.take().ids == {}
    bus.publish(Hint(Kind.EVENTS, ("b", "a")))
    bus.publish(Hint(Kind.DELTAS, ("a",), "x"))
    bus.publish(Hint(Kind.DELTAS, ("b",), "y"))
    batch = mine.take()
    assert batch.ids == {Kind.EVENTS: {"a"}}
    assert [hint.text for hint in batch.deltas] == ["x"]
    assert bus.has_key(Kind.DELTAS, "a")
    mine.close()
    mine.close()
    assert not bus.has_key(Kind.DELTAS, "a")
    bus.publish(Hint(Kind.EVENTS, ("a",)))
    assert mine.take().ids == {}


async def test_too_many_ids_become_everything() -> None:
    bus = LocalBus()
    few = bus.subscribe([Kind.READY], max_ids=10)
    for number in range(25):
        bus.publish(Hint(Kind.READY, (str(number),)))
    batch = few.take()
    assert batch.everything == {Kind.READY}
    assert batch.ids == {}
    assert batch.wants(Kind.READY, "anything")
    bus.publish(Hint(Kind.READY, ("after",)))
    assert few.take().ids == {Kind.READY: {"after"}}


async def test_the_oldest_deltas_are_dropped_and_counted() -> None:
    bus = LocalBus()
    stream = bus.subscribe([Kind.DELTAS], key="a", max_deltas=3)
    for number in range(5):
        bus.publish(Hint(Kind.DELTAS, ("a",), str(number)))
    batch = stream.take()
    assert ([hint.text for hint in batch.deltas], batch.dropped) == (["2", "3", "4"], 2)
    assert stream.take().dropped == 0


async def test_looking_again_reaches_everyone() -> None:
    bus = LocalBus()
    everyone = bus.subscribe(ID_KINDS)
    stream = bus.subscribe([Kind.EVENTS], key="a")
    bus.look_again()
    assert everyone.take().everything == set(ID_KINDS)
    assert stream.take().wants(Kind.EVENTS, "a")


async def test_a_cancelled_get_loses_nothing() -> None:
    bus = LocalBus()
    subscription = bus.subscribe([Kind.READY])
    getting = asyncio.create_task(subscription.get())
    await asyncio.sleep(0)
    bus.publish(Hint(Kind.READY, ("a",)))
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert subscription.take().ids == {Kind.READY: {"a"}}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(
    st.dictionaries(st.sampled_from(ID_KINDS), st.lists(texts, min_size=1, max_size=400, unique=True)),
    st.lists(st.tuples(texts, st.text(st.characters(exclude_categories=["Cs"]), max_size=2500)), max_size=8),
    st.sets(st.sampled_from(ID_KINDS)),
)
def test_payloads_carry_everything_and_stay_below_the_limit(
    ids: dict[Kind, list[str]], deltas: list[tuple[str, str]], everything: set[Kind]
) -> None:
    hints = [Hint(kind, tuple(names)) for kind, names in ids.items()]
    hints += [Hint(kind, everything=True) for kind in everything]
    hints += [Hint(Kind.DELTAS, (agent,), text) for agent, text in deltas]
    payloads = list(encode("origin01", hints))
    assert all(len(payload.encode()) < 8_000 for payload in payloads)
    heard = [hint for payload in payloads for hint in decode(payload)[1]]
    for kind in ID_KINDS:
        got = [name for hint in heard if hint.kind is kind for name in hint.ids]
        assert got == ids.get(kind, [])
        assert any(hint.everything for hint in heard if hint.kind is kind) == (kind in everything)
    fits = [delta for delta in deltas if len(msgspec.json.encode(delta)) < DELTA_LIMIT]
    got_deltas = [(hint.ids[0], hint.text) for hint in heard if hint.kind is Kind.DELTAS]
    assert [delta for delta in got_deltas if delta in fits] == fits


@pytest.mark.parametrize("width", [30, 450])  # with long ids the estimate of a payload's size has little to spare
def test_the_limit_counts_bytes_not_characters(width: int) -> None:
    ids = tuple(f"{'é' * width}{number:04d}" for number in range(500))
    payloads = list(encode("o", [Hint(Kind.READY, ids)]))
    assert max(len(payload.encode()) for payload in payloads) < 8_000
    assert [name for payload in payloads for hint in decode(payload)[1] for name in hint.ids] == list(ids)


def test_a_delta_that_cannot_fit_is_left_out() -> None:
    assert list(encode("o", [Hint(Kind.DELTAS, ("a",), "é" * 4_000)])) == []


@pytest.mark.parametrize("payload", ["", "{", "[]", '{"i":{}}', '{"o":"x","i":{"unknown":["a"]}}', '{"o":1}'])
def test_foreign_text_is_refused(payload: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)
