"""The growing end of a project's joint log: read once for all streams of this process that follow it.

A look asks what was committed since the last one, makes the frames, and hands the same bytes to every reader. A reader
that does not take them in time loses its queue and nothing else: it goes back to the log from where it was.
A look costs in proportion to the project's agents, so looks are at most a tenth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final
from uuid import UUID

import msgspec

from omnara.api import frames, project_cursor
from omnara.api.event_json import Owner, stored_event
from omnara.api.project_cursor import Place
from omnara.clock import monotonic
from omnara.db import project_log as db
from omnara.db.connection import Connection
from omnara.db.project_log import Growth, Here, Mark
from omnara.db.reads import EventRow
from omnara.errors import Unavailable

Acquire = Callable[[], AbstractAsyncContextManager[Connection]]

PAGE: Final = 100
"""Events per read. Source: api.md §11."""
AGENTS_PER_LOOK: Final = 500
"""Logs that a look follows at once; when more have grown, the readers read for themselves."""
EVENTS_PER_LOOK: Final = 1_000
QUEUE_BYTES: Final = 512 * 1024
"""Frames that wait for one client; beyond them it reads from the log again."""
GAP_S: Final = 0.01
"""Between two looks; also lets commits of the same moment come in one."""
SHARE: Final = 10
"""After two looks that took long there is none for so many times the shorter one's length. One alone says nothing: a
database that stood still for a moment would keep the streams waiting for ten times as long."""
FIRST_AGENT: Final = UUID(int=0)


class ProjectFrame(msgspec.Struct, frozen=True):
    """A frame, and where a reader is that has it."""

    data: bytes
    place: Place


class ProjectReader:
    """One stream's queue. Written by the tail, read by exactly one task; both in the same event loop."""

    __slots__ = ("_bytes", "_deaf", "_items", "_waiter", "behind", "closed")

    def __init__(self) -> None:
        self._items: deque[ProjectFrame] = deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._deaf = False
        self.behind = False
        self.closed = False

    async def wait(self) -> None:
        """Return when there is something to take or to do, or at a tick. For one task."""
        if self._items or self.behind or self.closed:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[ProjectFrame]:
        """Return and forget the frames that wait, in order."""
        items = list(self._items)
        self._items.clear()
        self._bytes = 0
        return items

    def offer(self, frame: ProjectFrame) -> None:
        """Queue a frame, or give the queue up when it is full."""
        if self.behind or self._deaf:
            return
        if self._bytes + len(frame.data) > QUEUE_BYTES:
            self.wake()
            return
        self._items.append(frame)
        self._bytes += len(frame.data)
        self.tick()

    def wake(self) -> None:
        """Make the reader read for itself from where it is."""
        self.take()
        self.behind = True
        self.tick()

    def begin(self) -> None:
        """Queue from now on."""
        self.take()
        self.behind = self._deaf = False

    def rest(self) -> None:
        """Queue nothing and read nothing before the next `wake`: what is missing comes before whatever is offered."""
        self.take()
        self.behind, self._deaf = False, True

    def tick(self) -> None:
        """Let `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self.tick()


class Pace:
    """Seconds to the next look, by what the looks before took."""

    def __init__(self) -> None:
        self._before_s = 0.0

    def after(self, took_s: float) -> float:
        """Return the pause after a look that took so many seconds."""
        pause_s = max(GAP_S, SHARE * min(took_s, self._before_s))
        self._before_s = took_s
        return pause_s


class ProjectTail:
    """The end of one project's joint log in this process. Lives while it has readers."""

    def __init__(self, org_id: UUID, project_id: UUID, acquire: Acquire, here: Here) -> None:
        self.project_id = project_id
        self.database = here.database
        self.mark = here.mark
        self.readers: set[ProjectReader] = set()
        self._org_id = org_id
        self._acquire = acquire
        self._poked = asyncio.Event()
        self._looking = asyncio.Lock()
        self._looks = 0

    def poke(self) -> None:
        """Have a look soon."""
        self._poked.set()

    async def run(self, sweep_s: float) -> None:
        """Look when poked and every `sweep_s` seconds; a sweep over very many agents comes less often."""
        pause_s, pace = GAP_S, Pace()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(sweep_s, pause_s)):
                    await self._poked.wait()
            self._poked.clear()
            started = monotonic()
            try:
                await self.look()
            except Unavailable:
                # Whatever was missed is in the log, and the next look finds it.
                self._poked.set()
                await asyncio.sleep(sweep_s)
                continue
            pause_s = pace.after(monotonic() - started)
            await asyncio.sleep(pause_s)

    async def look(self) -> None:
        """Move the mark to a moment after this call began, and hand on what came until then.

        Calls that wait for one look share the next. Raises Unavailable, with nothing moved and nothing handed on.
        """
        wanted = self._looks + (2 if self._looking.locked() else 1)
        async with self._looking:
            if self._looks >= wanted:
                return
            async with self._acquire() as conn:
                found = await db.growth(conn, self.project_id, self.mark, None, FIRST_AGENT, AGENTS_PER_LOOK)
                fits = not found.more and sum(item.high - item.low for item in found.growth) <= EVENTS_PER_LOOK
                news = await self._read(conn, found.growth, found.mark) if fits else []
            self.mark = found.mark
            self._looks += 1
            for reader in self.readers:
                if not fits:
                    reader.wake()
                for frame in news:
                    reader.offer(frame)

    async def missed(self, place: Place, until: Mark) -> AsyncIterator[list[ProjectFrame]]:
        """Yield the frames from a place to a moment, page by page. `place.until` must be None or `until`.

        Raises Unavailable. No connection is held between two pages.
        """
        after = place.agent_id
        agent, more = FIRST_AGENT if after is None else UUID(int=max(after.int - 1, 0)), True
        while more:
            async with self._acquire() as conn:
                found = await db.growth(conn, self.project_id, place.since, until, agent, AGENTS_PER_LOOK)
            agent, more, ranges = found.last_agent, found.more, _after(found.growth, after, place.sequence)
            while ranges:
                async with self._acquire() as conn:
                    page, ranges = await self._page(conn, ranges, place.since, until)
                if page:
                    yield page

    async def _read(self, conn: Connection, ranges: list[Growth], until: Mark) -> list[ProjectFrame]:
        made: list[ProjectFrame] = []
        while ranges:
            page, ranges = await self._page(conn, ranges, self.mark, until)
            made += page
        return made

    async def _page(
        self, conn: Connection, ranges: list[Growth], since: Mark | None, until: Mark
    ) -> tuple[list[ProjectFrame], list[Growth]]:
        """Return frames of the first events in these ranges, and the ranges that are left."""
        chosen = wanted = 0
        while chosen < len(ranges) and wanted < PAGE:
            wanted += ranges[chosen].high - ranges[chosen].low
            chosen += 1
        rows = await db.events(conn, ranges[:chosen], PAGE)
        if not rows:
            return [], ranges[chosen:]
        last_agent, last = rows[-1]
        made = [self._frame(agent_id, row, Place(since, until, agent_id, row.sequence)) for agent_id, row in rows]
        return made, _after(ranges, last_agent, last.sequence)

    def _frame(self, agent_id: UUID, row: EventRow, place: Place) -> ProjectFrame:
        kind, event = stored_event(Owner.of(self._org_id, self.project_id, agent_id), row)
        text = project_cursor.encode(self.project_id, self.database, place)
        return ProjectFrame(frames.durable(text, kind, event), place)


def _after(ranges: list[Growth], agent_id: UUID | None, sequence: int) -> list[Growth]:
    """Return what is left of ranges in order of agent, after one agent's event."""
    if agent_id is None:
        return ranges
    left = [item for item in ranges if item.agent_id >= agent_id]
    if left and left[0].agent_id == agent_id:
        first = Growth(agent_id, max(left[0].low, sequence), left[0].high)
        left = [first, *left[1:]] if first.low < first.high else left[1:]
    return left
