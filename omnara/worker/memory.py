"""What one run remembers of its agent's conversation: from the cache, up to date, in step with every save."""

from __future__ import annotations

from collections.abc import Sequence

from omnara.domain.claim import Claim
from omnara.domain.events import Event
from omnara.worker.context_cache import CachedContext, caught_up
from omnara.worker.host import RunHost


class Memory:
    """One run's conversation. `close` gives it back to the cache of the process."""

    def __init__(self, host: RunHost, claim: Claim) -> None:
        self._host = host
        self._claim = claim
        self._entry: CachedContext | None = None

    def open(self) -> int:
        """Take the conversation from the cache; returns the sequence from which the log is to be read."""
        self._entry = self._host.cache.take(self._claim)
        return self._entry.next_read

    @property
    def is_current(self) -> bool:
        """Whether it reaches the head of the log as the claim told it, so that there is nothing to read."""
        entry, claim = self._entry, self._claim
        if entry is None or entry.last_id is None:
            return False
        return (entry.sequence, entry.last_id) == (claim.next_sequence - 1, claim.head_id)

    def absorb(self, rows: Sequence[object]) -> None:
        """Take over rows read from there. If they do not fit, the step reads again, and meets what is wrong."""
        if self._entry is not None and not self._entry.absorb(rows):
            self._entry = None

    def fold(self, events: Sequence[Event]) -> None:
        """Take over what was just saved."""
        if self._entry is not None:
            self._entry.follow(events)

    async def up_to(self, frontier: int) -> CachedContext:
        """Return the conversation up to exactly `frontier`, read where memory does not reach.

        Raises DamagedLog, Unavailable.
        """
        entry = self._entry if self._entry is not None else self._host.cache.take(self._claim)
        if entry is not self._entry or entry.sequence != frontier or entry.last_id is None:
            entry = await self._read(entry, frontier)
        self._entry = entry
        return entry

    def forget(self) -> None:
        """Give nothing back: what was folded may have a hole."""
        self._entry = None

    def close(self) -> None:
        """Give the conversation back to the cache."""
        if self._entry is not None:
            self._host.cache.put(self._claim.agent_id, self._entry)
            self._entry = None

    async def _read(self, entry: CachedContext, head: int) -> CachedContext:
        async with self._host.reading() as connection:
            return await caught_up(connection, self._claim, entry, head)
