"""One exec into a container, over which all requests for its processes go: a request costs two forks, not an exec.

An exec costs about 50 ms, a request over this one 3. Answers come on its standard output, news (`out`, `exit` and
`act`) on its standard error, so that neither can break into the other. It may vanish at any moment, with the engine,
the container or a command that kills what it finds: nothing is lost with it, and the next is opened when it is needed.
Source: machines.md §13 (what was measured of exec).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from omnara.machines.docker.launchscript import DURABLE, TRANSIENT
from omnara.machines.docker.records import Reply
from omnara.machines.processes import HomeFull, HomeLost

__all__ = ["ENGINE_ERRORS", "Channel"]

ENGINE_ERRORS: Final = (DockerError, aiohttp.ClientError, OSError, TimeoutError, AssertionError, RuntimeError)
"""What aiodocker raises when the engine is away or a stream breaks; some of its checks are asserts."""

OPEN_S: Final = 20.0
REQUEST_S: Final = 20.0
MAX_REPLY: Final = 16 * 1024 * 1024
MAX_LINES: Final = 100_000
"""Of one answer. Empty ones would take far more memory here than they have bytes."""
MAX_TIDING: Final = 65_536
NEWS_PER_S: Final = 262_144
"""Bytes of news that are read within a second, of which a machine at work has hundreds. Who runs there can write news
as well, as fast as a pipe takes them: more than this makes the machine wait, and not the server."""

_SHIM: Final = (Path(__file__).parent / "shim.sh").read_bytes()
_BOOT: Final = 'eval "$(dd bs=$1 count=1 iflag=fullblock 2>/dev/null)"'


class Channel:
    """An open exec. Requests go one after the other; `on_tiding` is called for each line of news, from the reader."""

    def __init__(self, stream: Stream, on_tiding: Callable[[str], None], on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_tiding = on_tiding
        self._on_close = on_close
        self._one = asyncio.Lock()
        self._parser = _Parser()
        self._heard = 0.0
        self._heard_at = time.monotonic()
        self._answer: asyncio.Future[Reply] | None = None
        self._closed = False
        self._reader = asyncio.create_task(self._read(), name="docker channel")

    @classmethod
    async def open(
        cls,
        container: DockerContainer,
        on_tiding: Callable[[str], None],
        on_close: Callable[[], None],
        write_limit_s: float,
    ) -> Channel:
        """Start the shim in a running container. Raises HomeLost."""
        tail = (
            f"V={DURABLE} T={TRANSIENT} WRITE={write_limit_s:g}\nexec 9>&2 2>/dev/null\nserve {secrets.token_hex(8)}\n"
        )
        script = _SHIM + tail.encode()
        try:
            async with asyncio.timeout(OPEN_S):
                command = ["/bin/sh", "-c", _BOOT, "omnara", str(len(script))]
                process = await container.exec(command, stdin=True, stdout=True, stderr=True, tty=False)
                stream = process.start(detach=False)
                await _begin(stream)
                channel = cls(stream, on_tiding, on_close)
        except ENGINE_ERRORS as error:
            raise HomeLost(f"the container cannot be reached: {error}") from error
        try:
            await channel._exchange(script)
        except HomeFull as error:
            # A full disk refuses commands; where not even a line can be had, only another container helps.
            await channel.close()
            raise HomeLost("there is no place in the container for what a line needs") from error
        except BaseException:
            await channel.close()
            raise
        return channel

    @property
    def closed(self) -> bool:
        """True once no request can be answered any more."""
        return self._closed

    async def request(self, line: str, body: bytes = b"") -> Reply:
        """Send one request and return its answer. Raises HomeLost, HomeFull.

        Cancellation and a time-out close the channel: an answer without its question would be taken for the next.
        """
        async with self._one:
            return await self._exchange(f"{line} {len(body)}\n".encode() + body)

    async def _exchange(self, sent: bytes) -> Reply:
        if self._closed:
            raise HomeLost("the line into the container is closed")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._stream.write_in(sent)
                reply = await answer
        except ENGINE_ERRORS as error:
            self._shut()
            raise HomeLost(f"the container does not answer: {error}") from error
        except BaseException:
            self._shut()
            raise
        if reply.lines and reply.lines[0] == "! full":
            raise HomeFull("the machine's disk is full")
        return reply

    async def _read(self) -> None:
        try:
            while (message := await self._stream.read_out()) is not None:
                if message.stream == 2:
                    for tiding in dict.fromkeys(self._parser.tidings(message.data)):
                        self._on_tiding(tiding)
                    await asyncio.sleep(self._too_loud(len(message.data)))
                else:
                    self._take(message.data)
                    # Where there is always more to read, reading never waits, and nobody else would get a turn.
                    await asyncio.sleep(0)
        except (*ENGINE_ERRORS, ValueError) as error:
            self._fail(HomeLost(f"the line into the container broke: {error}"))
        else:
            self._fail(HomeLost("the shell in the container ended"))
        finally:
            self._shut()

    def _take(self, data: bytes) -> None:
        """Read a piece of an answer. Raises ValueError for one that nobody asked for: it is not the shim who speaks."""
        if self._answer is None or self._answer.done():
            raise ValueError("it speaks without being asked")
        for reply in self._parser.replies(data):
            if self._answer.done():
                raise ValueError("it answers more than it was asked")
            self._answer.set_result(reply)

    def _too_loud(self, size: int) -> float:
        """Return for how many seconds nothing more is to be read after so many bytes of news."""
        now = time.monotonic()
        self._heard = max(0.0, self._heard - (now - self._heard_at) * NEWS_PER_S) + size
        self._heard_at = now
        return max(0.0, self._heard / NEWS_PER_S - 1)

    def _fail(self, error: HomeLost) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.cancel()
            self._on_close()

    async def close(self) -> None:
        """End the shell in the container and let go of the connection. What runs there runs on."""
        self._shut()
        try:
            await asyncio.wait((self._reader,))
        finally:  # whoever is canceled here was the last to know of the connection; closing it waits for nothing
            with contextlib.suppress(*ENGINE_ERRORS):
                await self._stream.close()


async def _begin(stream: Any) -> None:
    """Make the connection now, so that a container that is not running is told here and not at the first request."""
    try:
        await stream.__aenter__()
    except BaseException:
        # What never came about still holds the engine's answer; that it has no connection is one of its asserts.
        with contextlib.suppress(*ENGINE_ERRORS):
            await stream.close()
        raise


class _Parser:
    """Cuts the two streams into answers and lines, holding no more than one answer may have."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._news = bytearray()
        self._lines: list[str] = []
        self._data = b""
        self._size = 0
        self._wanted = 0

    def tidings(self, data: bytes) -> list[str]:
        """Return the complete lines of news."""
        self._news += data
        *lines, rest = self._news.split(b"\n")
        self._news = bytearray(rest)
        if len(self._news) > MAX_TIDING:
            raise ValueError("a line without an end")
        return [line.decode("ascii", "replace") for line in lines]

    def replies(self, data: bytes) -> list[Reply]:
        """Return the answers that these bytes complete. Raises ValueError when there is no end to one."""
        self._buffer += data
        self._size += len(data)
        found: list[Reply] = []
        while self._step(found):
            pass
        if self._size > MAX_REPLY or len(self._lines) > MAX_LINES:
            raise ValueError("an answer without an end")
        return found

    def _step(self, found: list[Reply]) -> bool:
        if self._wanted:
            if len(self._buffer) < self._wanted:
                return False
            self._data = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            self._wanted = 0
            return True
        end = self._buffer.find(b"\n")
        if end < 0:
            return False
        line = self._buffer[:end].decode("ascii", "replace")
        del self._buffer[: end + 1]
        if line == ".":
            found.append(Reply(tuple(self._lines), self._data))
            self._lines, self._data, self._size = [], b"", len(self._buffer)
            return True
        self._lines.append(line)
        if line.startswith("d "):
            self._wanted = max(0, min(int(line.rsplit(" ", 1)[1]), MAX_REPLY + 1))
        return True
