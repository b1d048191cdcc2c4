"""Live frames of all streams, written once per turn of the event loop without waking the streams' tasks.

At thousands of tokens a second the wake-up of a task costs more than the bytes that it writes. So while a stream's
task waits for something to do and its client takes what it is given, what arrives is written for it: one callback
serves every stream that got something in this turn, and what came for one stream in the meantime leaves as one write.
Everything else (reading the log, a client that is behind, the end) stays with the task. Source: DESIGN §6, §9.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnara.clock import monotonic

__all__ = ["Flusher"]

Flush = Callable[[float], None]
"""Writes what waits for one stream, given the time (`clock.monotonic`, s). Must not raise."""


class Flusher:
    """The streams that have something to write. For one event loop."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Flush] = []

    def add(self, flush: Flush) -> None:
        """Call `flush` in the next turn of the event loop. The caller adds a stream once until it was called."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(flush)

    def _run(self) -> None:
        due, self._due = self._due, []
        now = monotonic()
        for flush in due:
            flush(now)
