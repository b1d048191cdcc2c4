"""Very many streams at once: what they share, what they hold, and what clients that do not behave can do to the others.

Source: field-reports B31; DESIGN §6, §9 (30 KB of memory for an open stream).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import select
import socket
import struct
import sys
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio

from omnara.api import event_json, half_open, sse, streams
from omnara.db.streams import LogPage
from omnara.errors import Unavailable
from omnara.ids import IdKind, decode
from tests.contract.server import ApiServer, api_server
from tests.contract.stream_client import open_stream
from tests.integration.test_api_stream_ends import append
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until


@pytest_asyncio.fixture(loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, roles=frozenset({"api"}), stream_sweep_s=0.3, stream_heartbeat_s=0.4) as running,
    ):
        yield running


def agent_of(path: str) -> UUID:
    return decode(IdKind.AGENT, path.rsplit("/", 1)[1])


async def test_readers_of_one_agent_share_reads_and_frames(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint from another replica wakes all readers of an agent: they read and encode once, not once each."""
    agent = await server.agent()
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_stream(server, agent)) for _ in range(100)]
        for stream in opened:
            assert await stream.events(1) == [1]
        reads: list[int] = []
        made: list[int] = []
        real_page, real_event = streams.db.page, event_json.stored_event

        async def counted_page(conn: Any, agent_id: UUID, after: int, limit: int) -> LogPage | None:
            reads.append(after)
            return await real_page(conn, agent_id, after, limit)

        def counted_event(owner: Any, row: Any) -> Any:
            made.append(row.sequence)
            return real_event(owner, row)

        monkeypatch.setattr(streams.db, "page", counted_page)
        monkeypatch.setattr(sse, "stored_event", counted_event)
        await append(server, agent_of(agent), 3)
        server.deps.feed.receive_hint(agent_of(agent))
        for stream in opened:
            assert await stream.events(3) == [2, 3, 4]
        # As many as there are connections may have begun before the others could join one.
        assert len(reads) <= 10
        assert len(made) <= 3 * len(reads)


async def test_a_shared_read_that_ends_badly_ends_only_its_own_reader(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_id = agent_of(await server.agent())
    hub = server.hub
    free = asyncio.Event()
    real = server.deps.db.acquire

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        await free.wait()
        async with real() as connection:
            yield connection

    monkeypatch.setattr(hub._db, "acquire", slow)
    leader, *others = [asyncio.create_task(hub.page(agent_id, 0)) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leader.cancel()
    free.set()
    pages = await asyncio.gather(*others)
    assert [page.log.head for page in pages if page is not None] == [1, 1, 1, 1]
    assert leader.cancelled()

    @contextlib.asynccontextmanager
    async def away() -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        raise Unavailable("the database is away")
        yield

    monkeypatch.setattr(hub._db, "acquire", away)
    failed = await asyncio.gather(*(hub.page(agent_id, 0) for _ in range(5)), return_exceptions=True)
    assert [type(error) for error in failed] == [Unavailable] * 5
    assert hub._asked == {}


async def test_an_open_stream_holds_little(server: ApiServer) -> None:
    """What the hub, the feed and the writer hold for an idle stream; sockets and buffers are measured by the bench."""
    agents = [agent_of(await server.agent()) for _ in range(20)]
    hub = server.hub
    reading = streams.Reading(agents[0], agents[0])

    def hold(stack: contextlib.ExitStack, count: int) -> None:
        for number in range(count):
            stack.enter_context(hub.open(agents[number % 20], reading=reading, deltas=True, after=0))

    with contextlib.ExitStack() as stack:
        hold(stack, 100)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        hold(stack, 2000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (after - before) / 2000 < 4096
    assert len(hub) == 0


async def test_a_thousand_streams_opened_and_left(server: ApiServer) -> None:
    agent = await server.agent()
    before = len(asyncio.all_tasks())

    async def visit() -> None:
        async with open_stream(server, agent):
            pass

    for _ in range(20):
        await asyncio.gather(*(visit() for _ in range(50)))
    await until(lambda: len(server.hub) == 0, "streams are closed", limit_s=20)
    assert server.deps.feed.local_agents() == {}
    assert server.hub._asked == {}
    await until(lambda: len(asyncio.all_tasks()) <= before, "tasks are gone", limit_s=20)


def deafen(sock: socket.socket) -> None:
    """Drop every packet that arrives for this socket, as a cut network does: nothing is acknowledged any more."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_ATTACH_FILTER", 26), program)


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
async def test_clients_that_vanish_without_a_word_are_noticed(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_open, "AT_LEAST_S", 0.3)
    agent = await server.agent()
    paths = (f"{agent}/events/stream", f"{server.scope}/events/stream")
    with contextlib.ExitStack() as sockets:
        for path in paths:
            gone = sockets.enter_context(socket.create_connection((server.host, server.port)))
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n"
            gone.sendall(head.encode())
            await until(lambda sock=gone: select.select([sock], [], [], 0)[0] != [], "the answer has begun")
            deafen(gone)
        assert len(server.hub) == 2
        async with open_stream(server, agent) as healthy:
            await until(lambda: len(server.hub) == 1, "they are taken for gone", limit_s=20)
            await append(server, agent_of(agent), 1)
            assert await healthy.events(2) == [1, 2]


async def test_text_cannot_forge_frames(server: ApiServer) -> None:
    """Source: field-reports B35: exactly one frame per event, whatever it holds."""
    forged = "\r\n\r\nid: 999\r\nevent: error\ndata: x\n\n: ok\n\n\u2028\u2029\x85id: 7"
    agent = await server.agent()
    payload = msgspec.json.encode(
        {
            "tool_call_id": "tcl_" + "a" * 26,
            "outcome": "succeeded",
            "content_blocks": [{"type": "text", "text": forged}],
        }
    ).decode()
    await append(server, agent_of(agent), 3)
    # As stored by us, and as another program may have stored it: with line breaks between the fields.
    for sequence, text in ((2, payload), (3, payload.replace(',"outcome"', ',\r\n\n"outcome"'))):
        await server.rows(
            "update events set payload = $3::json where agent_id = $1 and sequence = $2",
            agent_of(agent),
            sequence,
            text,
        )
    for path in (agent, f"{server.scope}"):
        async with open_stream(server, path, "" if path == agent else "?from=start") as stream:
            frames = await stream.told(4)
            assert [frame.event for frame in frames] == ["agent_input", "tool_result", "tool_result", "tool_result"]
            assert [frame.data["sequence"] for frame in frames] == [1, 2, 3, 4]
            assert [frame.data["content_blocks"][0]["text"] for frame in frames[1:3]] == [forged, forged]


async def test_clients_that_never_read_disturb_nobody(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.5)
    agent = await server.agent()
    paths = (f"{agent}/events/stream", f"{server.scope}/events/stream?from=start")
    lazies, real = set[object](), sse.StreamWriter._write

    async def write(writer: sse.StreamWriter, data: bytes) -> None:
        """Have patience with the one that reads: while this process stands still, it reads as little as the others."""
        if writer._transport is None or writer._transport.get_extra_info("peername") in lazies:
            await real(writer, data)
        else:
            await writer._response.write(data)

    monkeypatch.setattr(sse.StreamWriter, "_write", write)
    with contextlib.ExitStack() as sockets:
        for number in range(6):
            lazy = sockets.enter_context(socket.create_connection((server.host, server.port)))
            lazies.add(lazy.getsockname())
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"GET {paths[number % 2]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n"
            lazy.sendall(head.encode())
        await until(lambda: len(server.hub) == 6, "all are open")
        async with open_stream(server, agent) as healthy:
            await append(server, agent_of(agent), 20_000)
            server.deps.feed.wake(agent_of(agent))
            assert await healthy.events(20_001, within_s=30) == list(range(1, 20_002))
            await until(lambda: len(server.hub) == 1, "those that do not read are cut", limit_s=15)
