"""A two-way line of frames between a runtime and its server: a WebSocket, or two queues in one process."""

from __future__ import annotations

from typing import Protocol, TypeVar

__all__ = ["Link", "LinkClosed"]

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)

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
