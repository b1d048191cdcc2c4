"""What all answers that are being received hold at once: one bound for the process.

Each answer has a bound of its own, but a few hundred at that bound are more than a machine has. Nobody waits for room:
while the bound is passed, an answer that is larger than an equal share of it is cut at its next piece and asked for
again later, like any that breaks off; those of usual size go on. So all together never hold much more than twice the
bound, whatever a provider sends, and no call waits behind another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["DEFAULT_BYTES", "CutOff", "Received", "Share"]

DEFAULT_BYTES: Final = 2**28


class CutOff(Exception):
    """This answer holds more than its share while the process holds too much."""


class Share:
    """The bytes of one answer."""

    __slots__ = ("_all", "size")

    def __init__(self, received: Received) -> None:
        self._all = received
        self.size = 0

    def add(self, size: int) -> None:
        """Count bytes that came. Raises CutOff."""
        self.size += size
        self._all.take(size, self.size)


class Received:
    """The answers that are being received. Used by one event loop."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._limit = limit
        self._active = 0
        self.total = 0

    @contextmanager
    def answer(self) -> Iterator[Share]:
        """Count one answer for as long as the block runs."""
        share = Share(self)
        self._active += 1
        try:
            yield share
        finally:
            self._active -= 1
            self.total -= share.size

    def take(self, size: int, of_answer: int) -> None:
        """Count bytes of an answer that has `of_answer` by now. Raises CutOff."""
        self.total += size
        if self.total > self._limit and of_answer * self._active > self._limit:
            raise CutOff(f"the answers being received take more than {self._limit} bytes, and this one most of all")
