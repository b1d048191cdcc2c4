"""Which processes a home has, and which of those that are over may be forgotten.

Output is kept for later reads, but not for ever: a machine that ran ten thousand commands would otherwise read ten
thousand directories at each registration, and fill its disk.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Kept"]


class Kept:
    """Ids of everything in the home; `limit` of those whose end is settled stay, the newest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: dict[str, None] = {}
        self._settled: dict[str, None] = {}

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

    def settle(self, process_id: str) -> None:
        """The server knows the end of a process; only its output is of interest."""
        if process_id in self._all:
            self._settled[process_id] = None

    def too_many(self) -> list[str]:
        """Return the oldest settled ones beyond the limit, and count them as gone."""
        surplus = list(self._settled)[: max(0, len(self._settled) - self._limit)]
        for process_id in surplus:
            self.discard(process_id)
        return surplus
