"""A transaction pooler in miniature: each transaction of a client gets whichever server connection is free.

Enough of the wire protocol to show what such a pooler breaks: it refuses start-up parameters, shares server connections
between clients, and leaves session state behind on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

_SSL_REQUEST = 80877103
_CANCEL_REQUEST = 80877102
_ALLOWED = {"user", "database", "client_encoding", "application_name"}


class _Backend(asyncio.Protocol):
    """The raw bytes of a server connection after its authentication, cut into messages."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 5:
            size = struct.unpack_from("!I", self._buffer, 1)[0] + 1
            if len(self._buffer) < size:
                return
            self.messages.put_nowait(self._buffer[:size])
            self._buffer = self._buffer[size:]


class TransactionPooler:
    """Serves clients on `port` with `size` server connections, last used first."""

    def __init__(self, dsn: str, size: int) -> None:
        self._dsn = dsn
        self._size = size
        self._free: asyncio.LifoQueue[tuple[Any, _Backend]] = asyncio.LifoQueue()
        self._connections: list[asyncpg.Connection] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        for _ in range(self._size):
            conn = await asyncpg.connect(self._dsn)
            backend = _Backend()
            conn._transport.set_protocol(backend)
            self._connections.append(conn)
            self._free.put_nowait((conn._transport, backend))
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for conn in self._connections:
            conn.terminate()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            # Only `stop` cancels this task, and the stream server of Python 3.11 trips over a cancelled handler.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                if await self._greet(reader, writer):
                    await self._relay(reader, writer)
        finally:
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            size = struct.unpack("!I", await reader.readexactly(4))[0]
            body = await reader.readexactly(size - 4)
            code = struct.unpack_from("!I", body)[0]
            if code == _CANCEL_REQUEST:
                return False
            if code != _SSL_REQUEST:
                break
            writer.write(b"N")
        words = [word.decode() for word in body[4:].split(b"\0") if word]
        refused = set(words[::2]) - _ALLOWED
        if refused:
            text = f"unsupported startup parameter: {min(refused)}".encode()
            writer.write(_message(b"E", b"SFATAL\0VFATAL\0C08P01\0M" + text + b"\0\0"))
            await writer.drain()
            return False
        writer.write(_message(b"R", struct.pack("!I", 0)))
        for name, value in (("server_version", "15.0"), ("client_encoding", "UTF8"), ("integer_datetimes", "on")):
            writer.write(_message(b"S", f"{name}\0{value}\0".encode()))
        writer.write(_message(b"K", struct.pack("!II", 1, 1)) + _message(b"Z", b"I"))
        return True

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            message = await self._read(reader)
            if message[:1] == b"X":
                return
            transport, backend = await self._free.get()
            try:
                await self._one_transaction(message, reader, writer, transport, backend)
            finally:
                self._free.put_nowait((transport, backend))

    async def _one_transaction(
        self,
        message: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        transport: Any,
        backend: _Backend,
    ) -> None:
        while True:
            transport.write(message)
            while message[:1] not in (b"S", b"Q"):
                if message[:1] == b"H":
                    await self._answer_until(b"TnE", writer, backend)
                message = await self._read(reader)
                transport.write(message)
            answer = await self._answer_until(b"Z", writer, backend)
            if answer[5:6] == b"I":
                return
            message = await self._read(reader)
            if message[:1] == b"X":
                transport.write(_message(b"Q", b"rollback\0"))
                while (await backend.messages.get())[:1] != b"Z":
                    pass
                return

    async def _answer_until(self, kinds: bytes, writer: asyncio.StreamWriter, backend: _Backend) -> bytes:
        while True:
            answer = await backend.messages.get()
            writer.write(answer)
            if answer[:1] in kinds:
                return answer

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readexactly(5)
        return head + await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


@contextlib.asynccontextmanager
async def pooled(dsn: str, size: int = 2) -> AsyncIterator[str]:
    """Yield a URL that leads to the server of `dsn` through a transaction pooler."""
    pooler = TransactionPooler(dsn, size)
    await pooler.start()
    parts = urlsplit(dsn)
    try:
        yield urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{pooler.port}"))
    finally:
        await pooler.stop()
