"""Live frames that are written without waking a stream's task: when that happens, in which order, and when not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from omnara.api.flusher import Flusher
from omnara.api.lost_tails import Place
from omnara.api.sse import StreamWriter
from omnara.api.streams import SharedPage
from omnara.db.streams import LogPage
from omnara.domain.stream import TextDelta
from omnara.engine.feed import Feed, ModelDelta, Subscription
from omnara.ids import new_uuid

AGENT = new_uuid()


class Pipe:
    """A connection: what was written straight to it, and what the task wrote through the response."""

    def __init__(self, *, chunked: bool = True) -> None:
        self.headers = {"Transfer-Encoding": "chunked"} if chunked else {}
        self.straight: list[bytes] = []
        self.by_task: list[bytes] = []
        self.waiting = 0
        self.closing = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing

    def response(self) -> Any:
        async def write(data: bytes) -> None:
            self.by_task.append(data)

        return SimpleNamespace(headers=self.headers, write=write)

    def write(self, data: bytes) -> None:
        self.straight.append(data)


class Open:
    """A stream that has replayed an empty log and waits."""

    def __init__(self, feed: Feed, pipe: Pipe, flusher: Flusher) -> None:
        self.subscription: Subscription = feed.subscribe(AGENT, deltas=True)
        place = Place(AGENT, 0)
        stream = SimpleNamespace(subscription=self.subscription, place=place, written_at=0.0, ending=None, retry=False)
        hub = SimpleNamespace(flusher=flusher, heartbeat_s=60.0)
        request = SimpleNamespace(transport=pipe)
        writer = StreamWriter(
            cast("Any", hub), cast("Any", stream), cast("Any", None), cast("Any", request), pipe.response()
        )
        page = SharedPage(LogPage(head=0, gate="open", last_id=None, events=()))
        self.task = asyncio.create_task(writer.run(page))

    async def end(self) -> None:
        self.subscription.close()
        await self.task


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def text(seq: int, words: str = "a") -> ModelDelta:
    return ModelDelta("trn_1", "mcc_1", seq, TextDelta(0, words))


async def test_what_arrives_in_one_turn_leaves_as_one_chunk_past_the_task() -> None:
    feed, pipe = Feed(), Pipe()
    stream = Open(feed, pipe, Flusher())
    await turns()
    feed.delta(AGENT, text(1, "one"))
    feed.delta(AGENT, text(2, "two"))
    assert pipe.straight == [], "nothing is written inside the parser of a provider's answer"
    await turns()
    feed.delta(AGENT, text(3, "three"))
    await turns()
    first, second = pipe.straight
    size, _, body = first.partition(b"\r\n")
    assert body.endswith(b"\n\n\r\n")
    assert int(size, 16) == len(body) - 2
    assert first.index(b'"seq":1,') < first.index(b"one") < first.index(b'"seq":2,') < first.index(b"two")
    assert b"three" in second
    assert pipe.by_task == [b": ok\n\n"]
    await stream.end()


@pytest.mark.parametrize("reason", ["waiting", "closing", "not chunked"])
async def test_a_client_that_is_behind_is_left_to_the_task(reason: str) -> None:
    """Its patience and its limits are there."""
    feed, pipe = Feed(), Pipe(chunked=reason != "not chunked")
    stream = Open(feed, pipe, Flusher())
    await turns()
    pipe.waiting = int(reason == "waiting")
    pipe.closing = reason == "closing"
    feed.delta(AGENT, text(1, "one"))
    await turns()
    assert pipe.straight == []
    assert b"one" in pipe.by_task[-1]
    pipe.waiting, pipe.closing = 0, False
    feed.delta(AGENT, text(2, "two"))
    await turns()
    assert b"two" in (pipe.by_task if reason == "not chunked" else pipe.straight)[-1]
    await stream.end()


async def test_a_frame_that_cannot_be_made_ends_its_own_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, flusher = Feed(), Flusher()
    bad, good = Pipe(), Pipe()
    streams = [Open(feed, bad, flusher), Open(feed, good, flusher)]
    await turns()
    real = StreamWriter._frames

    def frames(writer: StreamWriter, items: list[Any]) -> bytes:
        if writer._transport is cast("Any", bad):
            raise ValueError("no such frame")
        return real(writer, items)

    monkeypatch.setattr(StreamWriter, "_frames", frames)
    feed.delta(AGENT, text(1, "one"))
    await turns()
    assert b"one" in good.straight[-1]
    with pytest.raises(ValueError, match="no such frame"):
        await streams[0].task
    await streams[1].end()


async def test_a_stream_that_has_ended_is_not_written_to() -> None:
    feed, pipe = Feed(), Pipe()
    stream = Open(feed, pipe, Flusher())
    await turns()
    feed.delta(AGENT, text(1))
    await stream.end()
    feed.delta(AGENT, text(2))
    await turns()
    assert pipe.straight == []


async def test_one_callback_serves_all_and_what_comes_meanwhile_waits_for_the_next() -> None:
    flusher, order = Flusher(), list[str]()

    def again(_now: float) -> None:
        order.append("first")
        flusher.add(lambda _now: order.append("later"))

    flusher.add(again)
    flusher.add(lambda _now: order.append("second"))
    assert order == []
    await asyncio.sleep(0)
    assert order == ["first", "second"]
    await asyncio.sleep(0)
    assert order == ["first", "second", "later"]
