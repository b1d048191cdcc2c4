"""A TCP relay that can go silent or cut, to stand for a network that drops packets or a server that goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit


class _Link:
    """One relayed connection: what its client said first, and whether its bytes flow."""

    def __init__(self) -> None:
        self.opening = b""
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.answers = asyncio.Event()
        self.answers.set()


class TcpProxy:
    """Relays to one address. While silent, bytes in both directions are held back and connections stay open.

    The black hole may be for some connections alone: those whose client's first bytes contain a text, old and new ones.
    A Postgres session states its application's name there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._swallowed: bytes | None = None
        self._deaf = False
        self._links: set[_Link] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Open the listening socket on a port the system chooses."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def go_silent(self, text: str = "") -> None:
        """Hold back everything from now on, or everything of the connections that began with this text."""
        self._swallowed = text.encode()
        for link in self._links:
            self._judge(link)

    def go_deaf(self) -> None:
        """Hold back what the server says from now on; what its clients say gets through."""
        self._deaf = True
        for link in self._links:
            self._judge(link)

    def flow(self) -> None:
        """Let everything through again."""
        self._swallowed = None
        self._deaf = False
        for link in self._links:
            self._judge(link)

    def _judge(self, link: _Link) -> None:
        if self._swallowed is not None and self._swallowed in link.opening:
            link.flowing.clear()
        else:
            link.flowing.set()
        if self._deaf:
            link.answers.clear()
        else:
            link.answers.set()

    def lead_to(self, host: str, port: int) -> None:
        """Relay new connections to another address."""
        self._target = (host, port)

    def cut(self) -> None:
        """Abort every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        """Close the socket and every connection."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        link = _Link()
        self._links.add(link)
        self._judge(link)
        try:
            # Only `stop` cancels this task, and the stream server of Python 3.11 trips over a cancelled handler.
            with contextlib.suppress(asyncio.CancelledError):
                await link.flowing.wait()
                await self._relay(link, reader, writer)
        finally:
            self._links.discard(link)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _relay(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        self._writers.add(server_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, reader, server_writer, client=True))
                group.create_task(self._pump(link, server_reader, writer))
        finally:
            self._writers.discard(server_writer)
            server_writer.transport.abort()

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, client: bool = False
    ) -> None:
        opening = client
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if opening:
                    opening = False
                    link.opening = data
                    self._judge(link)
                await link.flowing.wait()
                if not client:
                    await link.answers.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    """Yield a proxy before the server of `dsn` and the URL that leads through it."""
    parts = urlsplit(dsn)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = TcpProxy(parts.hostname, parts.port)
    await proxy.start()
    credentials = parts.netloc.rpartition("@")[0]
    try:
        yield proxy, urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{proxy.port}"))
    finally:
        await proxy.stop()
