"""Clients that open connections and then do next to nothing: they lose them, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web

from omnara.api.connection import ApiRunner, ConnectionLimits
from omnara.api.ops import Readiness
from omnara.app.listeners import ops_limits, ops_listener
from omnara.metrics import Metrics
from omnara.settings import Address, Settings
from tests.contract.server import ApiServer, api_server
from tests.contract.stream_client import open_stream
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

HEAD_S = 0.3
BODY_S = 0.4
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Peer:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer with its length given."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def rest(self, within_s: float = 20) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(within_s):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def drip(self, piece: bytes) -> None:
        """Send a piece again and again, until the connection is gone."""
        with contextlib.suppress(ConnectionError):
            while not self.reader.at_eof() and not self.writer.is_closing():
                self.writer.write(piece)
                await self.writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def peer(host: str, port: int, *, limit: int = 2**16) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection(host, port, limit=limit)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def small(limits: ConnectionLimits) -> AsyncIterator[tuple[str, int]]:
    """The address of a listener of our kind."""
    async with running(limits) as runner:
        yield runner.addresses[0][:2]


@contextlib.asynccontextmanager
async def running(limits: ConnectionLimits) -> AsyncIterator[ApiRunner]:
    """A listener with one quick and one long answer."""

    async def quick(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def long(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 2**25)

    app = web.Application()
    app.router.add_get("/healthz", quick)
    app.router.add_get("/long", long)
    runner = ApiRunner(app, limits)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner
    finally:
        await runner.cleanup()


@pytest.fixture
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with (
        postgres.fresh() as dsn,
        api_server(
            dsn, roles=frozenset({"api"}), request_head_timeout_s=HEAD_S, request_body_timeout_s=BODY_S
        ) as running,
    ):
        yield running


@pytest.mark.parametrize("begun", [b"", b"GET /api", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
async def test_half_a_head_is_not_waited_for(begun: bytes) -> None:
    async with small(ConnectionLimits(head_s=HEAD_S)) as (host, port), peer(host, port) as client:
        started = asyncio.get_running_loop().time()
        client.send(begun)
        assert await client.rest() == b""
        assert asyncio.get_running_loop().time() - started >= HEAD_S * 0.9


async def test_a_dripping_head_is_not_waited_for() -> None:
    async with small(ConnectionLimits(head_s=HEAD_S)) as (host, port), peer(host, port) as client:
        client.send(b"GET /healthz HTTP/1.1\r\n")
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(client.drip(b"X: y\r\n"))
            assert await client.rest() == b""


async def test_a_kept_connection_may_idle_but_not_drip() -> None:
    async with small(ConnectionLimits(head_s=HEAD_S, idle_s=30)) as (host, port), peer(host, port) as client:
        for _ in range(2):
            client.send(GET)
            assert (await client.answer())[0] == 200
            with pytest.raises(TimeoutError):
                await client.rest(HEAD_S * 2)
        client.send(b"GET /h")
        assert await client.rest(15) == b"", "closed long before the idle time"


async def test_an_idle_connection_ends() -> None:
    async with small(ConnectionLimits(idle_s=HEAD_S)) as (host, port), peer(host, port) as client:
        client.send(GET)
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""


async def test_an_answer_that_nobody_takes_is_cut() -> None:
    async with (
        running(ConnectionLimits(stall_s=HEAD_S)) as runner,
        peer(*runner.addresses[0][:2], limit=1024) as client,
    ):
        client.send(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.reader.readuntil(b"\r\n")
        # The reader stops at its limit, so the socket fills. Only the server's end can tell when it gave up.
        await until(lambda: runner.server is not None and not runner.server.connections, "the server gave up")
        assert len(await client.rest()) < 2**25


@pytest.mark.parametrize(
    ("framing", "piece"),
    [(b"Content-Length: 1000000", b"x"), (b"Transfer-Encoding: chunked", b"1\r\nx\r\n"), (b"Content-Length: 9", b"")],
)
async def test_a_body_has_to_arrive(server: ApiServer, framing: bytes, piece: bytes) -> None:
    agent = await server.agent()
    async with peer(server.host, server.port) as client:
        client.send(
            f"POST {agent}/inputs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n".encode()
            + b"Content-Type: application/json\r\n"
            + framing
            + b"\r\n\r\n"
        )
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            if piece:
                group.create_task(client.drip(piece))
            status, headers, body = await client.answer()
            assert (status, msgspec.json.decode(body)["code"]) == (400, "invalid_request")
            assert headers["server"] == "omnara"
            assert await client.rest() == b""


async def test_a_stranger_cannot_hold_a_connection_with_a_body(server: ApiServer) -> None:
    async with peer(server.host, server.port) as client:
        client.send(b"POST /api/v1/me HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(client.drip(b"1\r\nx\r\n"))
            assert (await client.answer())[0] in {401, 404}
            assert await client.rest() == b""


async def test_a_stream_outlives_the_limits(server: ApiServer) -> None:
    agent = await server.agent()
    async with open_stream(server, agent) as stream:
        assert await stream.events(1) == [1]
        async with peer(server.host, server.port) as other:
            assert await other.rest() == b"", "as long as the limit takes"
        change = {"source": "instruction: x\nmodel: {provider_config: anthropic, name: claude-sonnet-4-6}\n"}
        changed = await server.call("POST", f"{agent}/config", change | {"source_format": "yaml"})
        assert changed.status == 200, changed.text
        assert await stream.events(1) == [2]


async def test_the_ops_listener_waits_no_longer() -> None:
    async def check() -> Readiness:
        return Readiness(True)

    settings = Settings(ops_listen=Address("127.0.0.1", 0), request_head_timeout_s=HEAD_S)
    listener = ops_listener(settings.ops_listen, Metrics.create(), check, ops_limits(settings))
    await listener.start()
    try:
        async with peer(*listener.addresses[0]) as client:
            client.send(b"GET /hea")
            assert await client.rest() == b""
    finally:
        await listener.stop()


async def test_connections_over_the_limit_are_turned_away() -> None:
    async with small(ConnectionLimits(connections=3)) as (host, port), contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(peer(host, port)) for _ in range(3)]
        for client in held:
            client.send(GET)
            assert (await client.answer())[0] == 200
        async with peer(host, port) as client:
            client.send(GET)
            status, headers, body = await client.answer()
            assert (status, msgspec.json.decode(body)["code"]) == (503, "service_unavailable")
            assert headers["retry-after"] == "1"
            assert await client.rest() == b""
        async with peer(host, port) as silent:
            assert await silent.rest() == b"", "a silent one is closed as well"
        held[0].writer.transport.abort()

        async def served() -> bool:
            async with peer(host, port) as again:
                again.send(GET)
                return (await again.answer())[0] == 200

        await until(served, "the freed place is given away")


async def test_a_crowd_over_the_limit_takes_nobodys_place() -> None:
    async with small(ConnectionLimits(connections=2, head_s=30)) as (host, port), contextlib.AsyncExitStack() as stack:
        crowd = await asyncio.gather(*(stack.enter_async_context(peer(host, port)) for _ in range(200)))
        waits = {asyncio.create_task(client.rest()): client for client in crowd}
        for turned, ended in enumerate(asyncio.as_completed(waits), 1):
            assert await ended == b""
            if turned == 198:
                break
        kept = [task for task in waits if not task.done()]
        for task in kept:
            task.cancel()
        await asyncio.gather(*kept, return_exceptions=True)
        assert len(kept) == 2
        for task in kept:
            waits[task].send(GET)
            assert (await waits[task].answer())[0] == 200


async def test_the_setting_limits_the_api(postgres: PostgresForTests) -> None:
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, roles=frozenset({"api"}), max_connections=1) as server,
        peer(server.host, server.port) as first,
    ):
        first.send(GET)
        assert (await first.answer())[0] == 200
        async with peer(server.host, server.port) as second:
            second.send(GET)
            assert (await second.answer())[0] == 503
        first.send(GET)
        assert (await first.answer())[0] == 200


async def test_answers_name_no_versions_and_odd_expectations_get_json(server: ApiServer) -> None:
    answer = await server.call("GET", "/healthz", key=None)
    assert answer.headers["Server"] == "omnara"
    for path in ("/healthz", "/nowhere"):
        async with peer(server.host, server.port) as client:
            client.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n\r\n".encode())
            status, headers, body = await client.answer()
            assert (status, msgspec.json.decode(body)["code"]) == (400, "invalid_request")
            assert headers["server"] == "omnara"
            assert headers["content-type"].startswith("application/json")
    async with peer(server.host, server.port) as client:
        client.send(b"\x16\x03\x01 nonsense\r\n\r\n")
        status, headers, body = await client.answer()
        assert (status, headers["server"]) == (400, "omnara")
        assert msgspec.json.decode(body)["code"] == "invalid_request"
