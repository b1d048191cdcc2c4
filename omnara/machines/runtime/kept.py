"""Which processes a home has, and which of those that are over may be forgotten.

Output is kept for later reads, but not for ever: a machine that ran ten thousand commands would otherwise read ten
thousand directories at each registration, and fill its disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["Kept"]

MOST_DOUBTS: Final = 3
"""A server that offers a process again and again although it was told of its end is not told more often."""


class Kept:
    """Ids of everything in the home; `limit` of those whose end is settled stay, the newest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[str, None] = {}
        self._settled: dict[str, None] = {}
        self._doubts: dict[str, int] = {}

    def __contains__(self, process_id: str) -> bool:
        return process_id in self._all

    def replace(self, found: Iterable[str], settled: Iterable[str]) -> None:
        """Take what the home says it has; both oldest first."""
        self._all = dict.fromkeys(found)
        self._settled = dict.fromkeys(settled)

    def add(self, process_id: str) -> None:
        """A process was prepared."""
        self._all[process_id] = None

    def discard(self, process_id: str) -> None:
        """A process is not in the home any more."""
        self._all.pop(process_id, None)
        self._settled.pop(process_id, None)
        self._doubts.pop(process_id, None)

    def settle(self, process_id: str) -> None:
        """The server knows the end of a process; only its output is of interest."""
        if process_id in self._all:
            self._settled[process_id] = None

    def doubt(self, process_id: str) -> bool:
        """The server offers a process that is over here: it has forgotten it. True if it is to be told once more."""
        if process_id not in self._settled:
            return False
        self._doubts[process_id] = self._doubts.get(process_id, 0) + 1
        return self._doubts[process_id] <= MOST_DOUBTS

    def doubted(self, process_id: str) -> bool:
        """Say whether the server may have forgotten a process whose end it once acknowledged."""
        return 0 < self._doubts.get(process_id, 0) <= MOST_DOUBTS

    def too_many(self) -> list[str]:
        """Return the oldest settled ones beyond the limit, and count them as gone."""
        surplus = list(self._settled)[: max(0, len(self._settled) - self._limit)]
        for process_id in surplus:
            self.discard(process_id)
        return surplus
