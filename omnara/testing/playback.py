"""Playing an answer's frames onto a connection: pace, gates and the faults that strike inside a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import assert_never

import msgspec
from aiohttp import web

from omnara.testing.answer import Timing
from omnara.testing.faults import Cut, Drip, Silence, StreamError
from omnara.testing.frames import DELTAS, Frame, find
from omnara.testing.gates import Gate, point_of
from omnara.testing.request_log import Entry

StreamFault = StreamError | Cut | Silence | Drip


class Performance(msgspec.Struct, kw_only=True):
    """One answer to be played. `error` is the encoded error event for a `StreamError`."""

    frames: Sequence[Frame]
    timing: Timing
    gates: Sequence[Gate]
    fault: StreamFault | None
    error: bytes
    keepalive: bytes
    entry: Entry
    closing: asyncio.Event


def stop_at(fault: StreamFault | None, frames: Sequence[Frame]) -> int:
    """Return how many frames leave before the fault strikes; all of them without one."""
    match fault:
        case None:
            return len(frames)
        case Drip():
            return min(fault.frames, len(frames))
        case StreamError():
            return find(frames, fault.at)
        case Cut() | Silence():
            return find(frames, fault.at) if fault.frames is None else min(fault.frames, len(frames))
        case _:
            assert_never(fault)


class Player:
    """Plays one performance. Cancelled when the client goes away, which the caller records."""

    def __init__(self, request: web.BaseRequest, response: web.StreamResponse, show: Performance) -> None:
        self._request = request
        self._response = response
        self._show = show
        self._pending: list[bytes] = []
        self._due = 0.0

    async def play(self) -> None:
        """Send the headers and the frames, then do what the fault says. Raises `ConnectionError` on a dead client."""
        await self._response.prepare(self._request)
        show = self._show
        stop = stop_at(show.fault, show.frames)
        holds = {gate: find(show.frames, point) for gate in show.gates if (point := point_of(gate)) is not None}
        self._due = asyncio.get_running_loop().time() + show.timing.first_ms / 1000
        first = True
        for at, frame in enumerate(show.frames[:stop]):
            await self._hold(holds, at)
            if frame.kind in DELTAS:
                await self._pace(first=first)
                first = False
            self._pending.append(frame.data)
            show.entry.frames += 1
        await self._hold(holds, stop)
        await self._flush()
        await self._finish()

    async def _hold(self, holds: dict[Gate, int], at: int) -> None:
        for gate in [gate for gate, place in holds.items() if place == at]:
            del holds[gate]
            await self._flush()
            await gate.hold()

    async def _pace(self, *, first: bool) -> None:
        timing = self._show.timing
        step = timing.first_ms if first else timing.token_ms
        if not step:
            return
        await self._flush()
        loop = asyncio.get_running_loop()
        if not first:
            # From a fixed schedule, so that late wake-ups do not add up and the rate stays as stated.
            self._due += step / 1000
        await asyncio.sleep(max(0.0, self._due - loop.time()))

    async def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        if not data:
            return
        size = self._show.timing.chunk_bytes
        if not size:
            await self._response.write(data)
            return
        for at in range(0, len(data), size):
            await self._response.write(data[at : at + size])
            # Lets the transport send what it has, so that the reader really sees small pieces.
            await asyncio.sleep(0)

    async def _finish(self) -> None:
        fault = self._show.fault
        match fault:
            case None:
                await self._response.write_eof()
            case StreamError():
                await self._response.write(self._show.error)
                await self._response.write_eof()
            case Cut():
                await self._cut(clean=fault.clean)
            case Silence():
                await self._show.closing.wait()
                self._drop()
            case Drip():
                await self._drip(fault.interval_ms / 1000)
            case _:
                assert_never(fault)

    async def _cut(self, *, clean: bool) -> None:
        if clean:
            await self._response.write_eof()
        else:
            self._drop()

    async def _drip(self, interval: float) -> None:
        while not self._show.closing.is_set():
            await self._response.write(self._show.keepalive)
            try:
                async with asyncio.timeout(interval):
                    await self._show.closing.wait()
            except TimeoutError:
                continue
        self._drop()

    def _drop(self) -> None:
        if self._request.transport is not None:
            # close() would send what is buffered and then end the connection without the end of the body.
            self._request.transport.close()
