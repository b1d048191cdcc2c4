"""The body of an answer handed over in the read callback: every way in which it ends, and whose the connection is."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvloop

from omnara.providers.tap import deliver

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


class Script:
    """Answers every request with the same pieces; each but the first waits for `go`."""

    def __init__(self, pieces: list[bytes], *, close: bool) -> None:
        self.pieces, self.close = pieces, close
        self.go = asyncio.Semaphore(0)
        self.connections = 0
        self.gone = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for number, piece in enumerate(self.pieces):
                    if number:
                        await self.go.acquire()
                    writer.write(piece)
                    await writer.drain()
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()


@asynccontextmanager
async def answering(pieces: list[bytes], *, close: bool = False) -> AsyncIterator[tuple[Script, Any]]:
    script = Script(pieces, close=close)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with aiohttp.ClientSession() as session:
        yield script, lambda: session.get(url)
    server.close()
    for task in script.tasks:
        task.cancel()
    await asyncio.gather(*script.tasks, return_exceptions=True)


class Kept:
    """Takes everything."""

    def __init__(self) -> None:
        self.data = b""

    def __call__(self, data: bytes) -> bool:
        self.data += data
        return False


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LENGTH = HEAD + b"Content-Length: 6\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "close"),
    [
        ([LENGTH + b"abcdef"], False),
        ([LENGTH + b"ab", b"cd", b"ef"], False),
        ([CHUNKED + chunk(b"ab"), chunk(b"cd") + b"2\r", b"\nef\r\n0\r\n\r\n"], False),
        ([HEAD + b"\r\nab", b"cdef"], True),
        ([HEAD + b"Connection: close\r\nContent-Length: 6\r\n\r\nab", b"cdef"], True),
    ],
)
async def test_a_body_arrives_whole_however_it_ends(pieces: list[bytes], close: bool) -> None:
    async with answering(pieces, close=close) as (script, get):
        for _ in range(2):
            taken: list[bytes] = []

            def take(data: bytes, taken: list[bytes] = taken) -> bool:
                taken.append(data)
                script.go.release()
                return False

            async with get() as response:
                await asyncio.wait_for(deliver(response, take), 20)
            assert b"".join(taken) == b"abcdef"
        assert script.connections == (2 if close else 1), "a connection is used again where it can be"


async def test_enough_is_enough_and_the_connection_is_given_back() -> None:
    async with answering([CHUNKED + chunk(b"ab"), chunk(b"cd"), chunk(b"ef") + b"0\r\n\r\n"]) as (script, get):
        taken: list[bytes] = []

        def take(data: bytes) -> bool:
            taken.append(data)
            script.go.release()
            return len(taken) == 2

        async with get() as response:
            connection = response.connection
            assert connection is not None
            transport, inner = connection.transport, connection.protocol
            assert transport is not None
            await asyncio.wait_for(deliver(response, take), 20)
            assert transport.get_protocol() is inner
            script.go.release()
            assert await response.content.read() == b"ef"
        assert taken == [b"ab", b"cd"]


@pytest.mark.parametrize("close", [CHUNKED + chunk(b"ab"), LENGTH + b"ab"])
async def test_a_connection_that_breaks_is_an_error_of_the_client(close: bytes) -> None:
    kept = Kept()
    async with answering([close], close=True) as (_, get), get() as response:
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(deliver(response, kept), 20)
    assert kept.data == b"ab"


async def test_a_connection_that_its_owner_closes_ends_the_delivery() -> None:
    async with answering([CHUNKED + chunk(b"ab"), b""]) as (_, get), get() as response:
        task = asyncio.create_task(deliver(response, lambda _: False))
        await asyncio.sleep(0)
        assert response.connection is not None
        response.connection.protocol.close()
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(task, 20)


async def test_a_body_that_is_no_chunked_body_is_an_error_of_the_client() -> None:
    async with answering([CHUNKED + chunk(b"ab"), b"no size\r\n"]) as (script, get), get() as response:
        script.go.release()
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(deliver(response, lambda _: False), 20)


@pytest.mark.parametrize("at", [1, 2])
async def test_what_the_taker_raises_is_raised(at: int) -> None:
    async with answering([CHUNKED + chunk(b"ab"), chunk(b"cd"), b""]) as (script, get), get() as response:
        count = 0

        def take(_data: bytes) -> bool:
            nonlocal count
            count += 1
            script.go.release()
            if count == at:
                raise ValueError("enough")
            return False

        with pytest.raises(ValueError, match="enough"):
            await asyncio.wait_for(deliver(response, take), 20)
        assert count == at


async def test_cancellation_closes_the_connection() -> None:
    async with answering([CHUNKED + chunk(b"ab"), b""]) as (script, get):
        first = asyncio.Event()

        def take(_data: bytes) -> bool:
            first.set()
            return False

        async def read() -> None:
            async with get() as response:
                await deliver(response, take)

        task = asyncio.create_task(read())
        await asyncio.wait_for(first.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        script.go.release()
        await asyncio.wait_for(script.gone.wait(), 20)


async def test_a_body_far_larger_than_what_the_client_holds() -> None:
    """The client pauses the connection, also amid what it decompresses; taking bytes lets it go on."""
    body = bytes(range(256)) * 40_000
    packed = gzip.compress(body, 1)
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with answering([head + packed]) as (_, get), get() as response:
        kept = Kept()
        await asyncio.wait_for(deliver(response, kept), 30)
    assert kept.data == body


def test_all_of_it_on_the_event_loop_of_the_server() -> None:
    async def cases() -> None:
        await test_a_body_arrives_whole_however_it_ends([LENGTH + b"ab", b"cd", b"ef"], False)
        await test_a_body_arrives_whole_however_it_ends([HEAD + b"\r\nab", b"cdef"], True)
        await test_enough_is_enough_and_the_connection_is_given_back()
        await test_a_connection_that_breaks_is_an_error_of_the_client(LENGTH + b"ab")
        await test_a_connection_that_its_owner_closes_ends_the_delivery()
        await test_what_the_taker_raises_is_raised(2)
        await test_cancellation_closes_the_connection()
        await test_a_body_far_larger_than_what_the_client_holds()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cases())
