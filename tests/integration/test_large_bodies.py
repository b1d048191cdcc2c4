"""Large bodies at once: what has arrived of them is bounded, whoever is over the bound is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.api.large_bodies import COUNTED_FROM, LargeBodies
from omnara.errors import Unavailable
from omnara.metrics import Metrics
from tests.contract.server import Answered, ApiServer, api_server
from tests.support.pictures import block, png
from tests.support.waiting import until

MIB = 2**20
ROOM = 48 * MIB


@pytest_asyncio.fixture(loop_scope="session")
async def server(database: str) -> AsyncIterator[ApiServer]:
    async with api_server(database, roles=frozenset({"api"}), large_bodies_bytes=ROOM) as running:
        yield running


def message(size: int) -> bytes:
    """A message of exactly so many bytes, most of them blanks that JSON allows."""
    text = msgspec.json.encode({"content_blocks": [{"type": "text", "text": "hello"}]})
    return text[:-1] + b" " * (size - len(text)) + text[-1:]


class Slow:
    """A body that stops after `first` bytes until it is let go."""

    def __init__(self, body: bytes, first: int) -> None:
        self._body, self._first = body, first
        self.go_on = asyncio.Event()

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, self._first, MIB):
            yield self._body[start : min(start + MIB, self._first)]
        await self.go_on.wait()
        yield self._body[self._first :]


@asynccontextmanager
async def held(server: ApiServer, agent: str, size: int, arrived: int) -> AsyncIterator[asyncio.Task[int]]:
    """Send all but the end of a large message without announcing its length; the task returns the answer's status."""
    slow = Slow(message(size), arrived)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}

    async def send() -> int:
        url = f"{server.url}{agent}/inputs"
        async with server.session.post(url, data=slow.pieces(), headers=headers) as answer:
            await answer.read()
            return answer.status

    sending = asyncio.create_task(send())

    async def there() -> bool:
        assert not sending.done()
        return used(server) == arrived

    try:
        await until(there, "the body has arrived as far as it was sent")
        yield sending
        slow.go_on.set()
        await sending
    finally:
        sending.cancel()


def used(server: ApiServer) -> float:
    return sample(server, "omnara_large_body_bytes")


def sample(server: ApiServer, name: str) -> float:
    value = server.deps.metrics.registry.get_sample_value(name)
    assert value is not None
    return value


async def post(server: ApiServer, agent: str, size: int, **options: Any) -> Answered:
    return await server.call("POST", f"{agent}/inputs", message(size), **options)


async def test_over_the_bound_a_large_body_is_refused_and_small_ones_go_on(server: ApiServer) -> None:
    agent = await server.agent()
    async with held(server, agent, 40 * MIB + 1, 40 * MIB) as first:
        refused = await post(server, agent, 9 * MIB)
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "service_unavailable", "1")
        assert used(server) == 40 * MIB
        assert (await post(server, agent, COUNTED_FROM)).status == 201
        assert (await post(server, agent, 7 * MIB)).status == 201
    assert first.result() == 201
    assert used(server) == 0
    assert sample(server, "omnara_large_bodies_refused_total") == 1
    assert (await post(server, agent, 48 * MIB)).status == 201


async def test_a_body_of_unknown_length_is_refused_when_it_gets_too_large_for_the_room(server: ApiServer) -> None:
    agent = await server.agent()
    async with held(server, agent, 30 * MIB, 20 * MIB):
        slow = Slow(message(40 * MIB), 40 * MIB)
        slow.go_on.set()
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        async with server.session.post(f"{server.url}{agent}/inputs", data=slow.pieces(), headers=headers) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert used(server) == 0


async def test_a_sender_who_goes_away_leaves_its_room(server: ApiServer) -> None:
    agent = await server.agent()
    with pytest.raises(asyncio.CancelledError):
        async with held(server, agent, 40 * MIB, 39 * MIB) as sending:
            sending.cancel()

    async def free() -> bool:
        return used(server) == 0

    await until(free, "the room of a cut body is free")


async def test_a_refused_request_leaves_its_room(server: ApiServer) -> None:
    agent = await server.agent()
    broken = message(10 * MIB)[:-1]
    assert (await server.call("POST", f"{agent}/inputs", broken)).status == 400
    assert used(server) == 0


async def test_eighteen_uploads_at_once_all_come_in_when_they_are_repeated(server: ApiServer) -> None:
    agent = await server.agent()

    async def upload(number: int) -> int:
        blocks = [block(png(100, 80, padding=3 * MIB + number))]
        tries = 0
        while True:
            tries += 1
            body = {"content_blocks": blocks}
            answer = await server.call("POST", f"{agent}/inputs", body, headers={"Idempotency-Key": f"k{number}"})
            assert server.deps.metrics.registry.get_sample_value("omnara_large_body_bytes") <= ROOM  # type: ignore[operator]
            if answer.status != 503:
                assert answer.status == 201, answer.text
                return tries

    tries = await asyncio.gather(*(upload(number) for number in range(18)))
    assert max(tries) > 1, "18 bodies of 4 MiB fit into 48 MiB"
    assert used(server) == 0
    [row] = await server.rows("select count(*) from artifacts")
    assert row[0] == 18


def test_room_is_counted_in_bytes() -> None:
    metrics = Metrics.create()
    bodies = LargeBodies(10 * MIB, metrics)
    with bodies.share() as first, bodies.share() as second:
        first.arrived(MIB)
        assert bodies.used == 0
        first.arrived(9 * MIB)
        first.arrived(10 * MIB)
        second.arrived(MIB)
        with pytest.raises(Unavailable):
            second.arrived(MIB + 1)
        with pytest.raises(Unavailable):
            second.announced(2 * MIB)
        second.announced(None)
        second.announced(MIB)
        assert bodies.used == 10 * MIB
    assert bodies.used == 0
    assert metrics.registry.get_sample_value("omnara_large_bodies_refused_total") == 2
