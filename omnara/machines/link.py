"""A two-way line of frames between a runtime and its server: a WebSocket, or two queues in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["DEPTH", "Link", "LinkClosed", "memory_link"]

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)
S = TypeVar("S")
R = TypeVar("R")

DEPTH = 128
"""Frames that may wait in one direction. Source: machines.md §3 (the daemon's send queue)."""


class LinkClosed(Exception):
    """The line is gone. `code` as a WebSocket's close code; what was sent last may not have arrived."""

    def __init__(self, code: int = 1006, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".strip())
        self.code = code


class Link(Protocol[Sent, Received]):
    """One end of a line. Raises LinkClosed from everything once it is gone. One reader; any number of senders."""

    async def send(self, frame: Sent) -> None:
        """Send one frame; waits while the other side is slow."""

    async def receive(self) -> Received:
        """Return the next frame."""
        ...

    async def close(self, code: int = 1000) -> None:
        """Close the line for both ends. May be called again."""


class _Wire:
    """What both ends of a line within one process share: two queues and the fact that it is gone."""

    def __init__(self, depth: int) -> None:
        self.queues: tuple[asyncio.Queue[Any], asyncio.Queue[Any]] = (asyncio.Queue(depth), asyncio.Queue(depth))
        self.gone = asyncio.Event()
        self.closed: LinkClosed | None = None


class _MemoryEnd(Generic[S, R]):
    """One end. A receiver gets what had arrived before the line was closed, as with a socket."""

    def __init__(self, wire: _Wire, side: int) -> None:
        self._wire = wire
        self._out = wire.queues[side]
        self._in = wire.queues[1 - side]

    async def send(self, frame: S) -> None:
        if self._wire.closed is None and not self._out.full():
            self._out.put_nowait(frame)
            return
        await self._unless_gone(self._out.put(frame))

    async def receive(self) -> R:
        if not self._in.empty():
            return self._in.get_nowait()  # type: ignore[no-any-return]
        return await self._unless_gone(self._in.get())  # type: ignore[no-any-return]

    async def close(self, code: int = 1000) -> None:
        if self._wire.closed is None:
            self._wire.closed = LinkClosed(code)
            self._wire.gone.set()

    async def _unless_gone(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._wire.closed is not None:
            work.close()
            raise LinkClosed(self._wire.closed.code)
        doing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._wire.gone.wait())
        try:
            await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            assert self._wire.closed is not None
            raise LinkClosed(self._wire.closed.code)
        finally:
            doing.cancel()
            gone.cancel()


def memory_link(depth: int = DEPTH) -> tuple[Link[Any, Any], Link[Any, Any]]:
    """Return the two ends of a line within this process: what one sends, the other receives, as the same objects.

    A sender waits while `depth` frames have not been received. Either end closes it for both.
    """
    wire = _Wire(depth)
    return _MemoryEnd(wire, 0), _MemoryEnd(wire, 1)
