"""A raw reader of event streams: frames as they come, nothing interpreted away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from tests.contract.server import ApiServer


class Frame(msgspec.Struct):
    """One frame; a comment has only `comment`."""

    event: str = ""
    id: str | None = None
    data: Any = None
    comment: str = ""


class Stream:
    """An open stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._buffer = b""

    async def next(self, *, within_s: float = 20.0) -> Frame | None:
        """Return the next frame, comments included, or None at the end of the stream."""
        async with asyncio.timeout(within_s):
            while b"\n\n" not in self._buffer:
                chunk = await self.response.content.readany()
                if not chunk:
                    return None
                self._buffer += chunk
        raw, self._buffer = self._buffer.split(b"\n\n", 1)
        return parse(raw)

    async def told(self, count: int) -> list[Frame]:
        """Return the next `count` frames of events, without comments and places in between."""
        found: list[Frame] = []
        while len(found) < count:
            frame = await self.next()
            assert frame is not None, f"the stream ended after {found}"
            if frame.event:
                found.append(frame)
        return found

    async def until(self, event: str, *, within_s: float = 20.0) -> list[Frame]:
        """Return the frames up to the first of this name; comments are left out."""
        found: list[Frame] = []
        async with asyncio.timeout(within_s):
            while (frame := await self.next(within_s=within_s)) is not None:
                if not frame.comment:
                    found.append(frame)
                if frame.event == event:
                    return found
        raise AssertionError(f"the stream ended before {event}: {[frame.event for frame in found]}")

    async def events(self, count: int, *, within_s: float = 20.0) -> list[int]:
        """Return the ids of the next `count` durable events."""
        found: list[int] = []
        async with asyncio.timeout(within_s):
            while len(found) < count:
                frame = await self.next(within_s=within_s)
                assert frame is not None, f"the stream ended after {found}"
                if frame.id is not None:
                    found.append(int(frame.id))
        return found

    async def rest(self, *, within_s: float = 20.0) -> list[Frame]:
        """Return all frames until the stream ends; comments are left out."""
        found: list[Frame] = []
        async with asyncio.timeout(within_s):
            while (frame := await self.next(within_s=within_s)) is not None:
                if not frame.comment:
                    found.append(frame)
        return found


def parse(raw: bytes) -> Frame:
    """Read one frame."""
    frame = Frame()
    for line in raw.decode().split("\n"):
        if line.startswith(":"):
            frame.comment = line[1:].strip()
            continue
        name, _, value = line.partition(": ")
        if name == "event":
            frame.event = value
        elif name == "id":
            frame.id = value
        else:
            assert name == "data", line
            frame.data = msgspec.json.decode(value)
    return frame


@contextlib.asynccontextmanager
async def open_stream(
    server: ApiServer, agent: str, query: str = "", *, key: str | None = None, headers: dict[str, str] | None = None
) -> AsyncIterator[Stream]:
    """Open a stream and read its first comment."""
    bearer = {"Authorization": f"Bearer {key or server.key}"}
    url = f"{server.url}{agent}/events/stream{query}"
    async with server.session.get(
        url, headers=bearer | (headers or {}), timeout=aiohttp.ClientTimeout(None)
    ) as response:
        assert response.status == 200, await response.text()
        stream = Stream(response)
        first = await stream.next()
        assert first is not None
        assert first.comment == "ok"
        yield stream
