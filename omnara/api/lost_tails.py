"""Streams whose log has lost its end: a failover to a standby that had not got everything.

A log that is shorter than what was sent is seen at once. One that has grown again since is not: other events stand
under the same sequences. So a stream remembers the ids of what it sent, and after a change of timeline, which every
promotion and every restore makes, they are compared with the log. While the timeline stays, nothing of it can be lost,
and one id is enough. Source: coordination §8 (lost commits).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final
from uuid import UUID

from omnara.db import streams as db
from omnara.db.connection import Connection

__all__ = ["LostTails", "Place"]

REMEMBERED: Final = 256
"""Events between two looks whose ids are kept; of more than that the newest."""
CHUNK: Final = 5_000
"""Ids in one query."""

Acquire = Callable[[], AbstractAsyncContextManager[Connection]]


class Place:
    """How far a stream has come: the last sequence that was sent, and the ids of what was sent lately."""

    __slots__ = ("agent_id", "recent", "seen")

    def __init__(self, agent_id: UUID, seen: int) -> None:
        self.agent_id = agent_id
        self.seen = seen
        self.recent: deque[tuple[int, UUID]] = deque(maxlen=REMEMBERED)

    def reached(self, sequence: int, event_id: UUID) -> None:
        """Note an event that was sent, or that the client says it has."""
        self.seen = sequence
        self.recent.append((sequence, event_id))

    def is_lost(self, head: int, event_id: UUID | None) -> bool:
        """Whether the log, whose event at `seen` has this id (None: there is none), is not the one that was sent."""
        if head < self.seen:
            return True
        return bool(self.recent) and self.recent[-1] != (self.seen, event_id)

    def settle(self) -> None:
        """What was sent so far is in the log for good, as far as its database keeps its promises."""
        while len(self.recent) > 1:
            self.recent.popleft()


class LostTails:
    """Knows the timeline of the last look."""

    def __init__(self) -> None:
        self._timeline: str | None = None

    async def among(self, acquire: Acquire, places: Sequence[Place]) -> set[UUID]:
        """Return the agents of those streams that have sent what the log does not have. Raises Unavailable."""
        async with acquire() as connection:
            timeline = await db.timeline(connection)
        lost: set[UUID] = set()
        if self._timeline not in (None, timeline):
            pairs = [(place.agent_id, *pair) for place in places for pair in place.recent]
            for start in range(0, len(pairs), CHUNK):
                async with acquire() as connection:
                    lost.update(await db.strangers(connection, *_columns(pairs[start : start + CHUNK])))
        self._timeline = timeline
        for place in places:
            if place.agent_id not in lost:
                place.settle()
        return lost


def _columns(pairs: Iterable[tuple[UUID, int, UUID]]) -> tuple[list[UUID], list[int], list[UUID]]:
    agents, sequences, ids = zip(*pairs, strict=True)
    return list(agents), list(sequences), list(ids)
