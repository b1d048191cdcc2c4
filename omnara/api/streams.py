"""The streams that are open in this process: their sweeps, heartbeats and ends, done once for all of them.

Hints make a stream fast; the sweep makes it right. One query every two seconds finds every log that grew unheard, one
more each second finds rights that are gone, and a timer sees to heartbeats, so an idle stream costs no task of its own
but the reader and no timer at all. Source: DESIGN §3, §6; coordination §6; field-reports B31, B56.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal, Protocol, TypeVar
from uuid import UUID

from omnara.access.roles import ProjectScope
from omnara.api.flusher import Flusher
from omnara.api.lost_tails import LostTails, Place
from omnara.api.project_tails import Following, ProjectTails
from omnara.clock import Deadline, jittered, monotonic
from omnara.db import streams as db
from omnara.db.pool import ApiPool
from omnara.db.streams import LogPage, Reading
from omnara.engine.feed import Feed, Subscription
from omnara.errors import Unavailable
from omnara.log import get_logger
from omnara.metrics import Metrics
from omnara.service import Tasks

log = get_logger(__name__)

PAGE: Final = 100
"""Events per page of a replay. Source: api.md §11."""
SWEEP_CHUNK: Final = 1_000
"""Streams per sweep query. Source: coordination §6."""
RIGHTS_CHECK_S: Final = 0.8
"""With the query, a stream outlives the right to read it by less than a second."""
CLOSE_LIMIT_S: Final = 1.0
"""How long closing streams may write before they are cut. Source: DESIGN §3 (Shutdown)."""

Ending = Literal["shutdown", "revoked", "lost"]


class Queue(Protocol):
    """What the hub does to the queue of a stream."""

    def tick(self) -> None:
        """Let the stream's task run once."""

    def wake(self) -> None:
        """Send the stream to the log."""

    def close(self) -> None:
        """End the stream."""


class OpenStream:
    """One open stream as the hub sees it. `written_at` is kept by the stream itself."""

    __slots__ = ("ending", "queue", "reading", "retry", "task", "written_at")

    def __init__(self, queue: Queue, reading: Reading) -> None:
        self.queue = queue
        self.reading = reading
        self.written_at = monotonic()
        self.retry = False
        self.ending: Ending | None = None
        self.task = asyncio.current_task()

    def end(self, why: Ending) -> None:
        """Ask the stream to end; the first reason counts."""
        if self.ending is None:
            self.ending = why
        self.queue.close()


class AgentStream(OpenStream):
    """A stream of one agent. `place` is how far it has come; the stream keeps it."""

    __slots__ = ("place", "subscription")

    def __init__(self, subscription: Subscription, reading: Reading, seen: int) -> None:
        super().__init__(subscription, reading)
        self.subscription = subscription
        self.place = Place(subscription.agent_id, seen)


class SharedPage:
    """A page of a log and the frames of its events, made by the first of its readers."""

    __slots__ = ("frames", "log")

    def __init__(self, log: LogPage) -> None:
        self.log = log
        self.frames: list[bytes] | None = None


class _Abandoned(Exception):
    """Whoever read a page for others was cancelled."""


S = TypeVar("S", bound=OpenStream)


class StreamHub:
    """Registry and caretaker of open streams; a service of the process."""

    name = "streams"

    def __init__(self, feed: Feed, db: ApiPool, metrics: Metrics, *, heartbeat_s: float, sweep_s: float) -> None:
        self._feed = feed
        self._db = db
        self._open: set[OpenStream] = set()
        self._asked: dict[tuple[UUID, int], asyncio.Future[SharedPage | None]] = {}
        self._gauge = metrics.open_streams
        self._sweep_s = sweep_s
        self._tasks = Tasks()
        self._draining = False
        self._tails = ProjectTails(feed, db.acquire, self._tasks, sweep_s)
        self._lost_tails = LostTails()
        self.heartbeat_s = heartbeat_s
        self.flusher = Flusher()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(self, agent_id: UUID, *, reading: Reading, deltas: bool, after: int) -> Iterator[AgentStream]:
        """Register a stream for as long as the block runs, and subscribe it before anything is read.

        Raises Unavailable while the process shuts down.
        """
        self._check_open()
        subscription = self._feed.subscribe(agent_id, deltas=deltas, next_sequence=after + 1)
        try:
            with self._registered(AgentStream(subscription, reading, after)) as stream:
                yield stream
        finally:
            self._feed.unsubscribe(subscription)

    @asynccontextmanager
    async def open_project(
        self, project: ProjectScope, *, reading: Reading
    ) -> AsyncIterator[tuple[OpenStream, Following]]:
        """Register a stream over all agents of a project for as long as the block runs. Raises Unavailable."""
        self._check_open()
        async with self._tails.follow(project) as following:
            with self._registered(OpenStream(following.reader, reading)) as stream:
                yield stream, following

    @contextmanager
    def _registered(self, stream: S) -> Iterator[S]:
        # Once more, since a project's stream has waited for the database in between.
        self._check_open()
        self._open.add(stream)
        self._gauge.inc()
        try:
            yield stream
        finally:
            self._open.discard(stream)
            self._gauge.dec()

    def _check_open(self) -> None:
        if self._draining:
            raise Unavailable("this server is shutting down")

    async def page(self, agent_id: UUID, after: int) -> SharedPage | None:
        """Return the next page of a log, or None when there is no such agent. Raises Unavailable.

        Readers of one place share a read that has not begun: a hint wakes all readers of an agent at once, and they
        must not ask as many times. One that has begun may be older than what its caller was woken for.
        """
        key = (agent_id, after)
        while (asked := self._asked.get(key)) is not None:
            with contextlib.suppress(_Abandoned):
                return await asyncio.shield(asked)
        return await self._read(key)

    async def _read(self, key: tuple[UUID, int]) -> SharedPage | None:
        asked: asyncio.Future[SharedPage | None] = asyncio.get_running_loop().create_future()
        self._asked[key] = asked
        try:
            async with self._db.acquire() as conn:
                self._begun(key, asked)
                found = await db.page(conn, *key, PAGE)
        except BaseException as error:
            self._begun(key, asked)
            # Unavailable is everybody's; whatever else ends this reader is its own, and the others ask again.
            asked.set_exception(error if isinstance(error, Unavailable) else _Abandoned())
            asked.exception()
            raise
        page = None if found is None else SharedPage(found)
        asked.set_result(page)
        return page

    def _begun(self, key: tuple[UUID, int], asked: asyncio.Future[SharedPage | None]) -> None:
        if self._asked.get(key) is asked:
            del self._asked[key]

    # --- service ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to sweep."""
        self._tasks.spawn(self._repeat(self._sweep, self._sweep_s), "stream-sweep")
        self._tasks.spawn(self._repeat(self._check_rights, min(RIGHTS_CHECK_S, self._sweep_s)), "stream-rights")
        self._tasks.spawn(self._tick(), "stream-heartbeat")
        self._tasks.spawn(self._tails.meet(), "stream-projects")

    async def watch(self) -> None:
        """Wait until a part of the hub fails, and raise its error."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Refuse new streams and close all open ones: after a second those that cannot write are cut."""
        self._draining = True
        tasks = {stream.task for stream in self._open if stream.task is not None}
        for stream in list(self._open):
            stream.end("shutdown")
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)
        for task in stuck:
            task.cancel()

    async def stop(self) -> None:
        """Close what is left and end the sweeps."""
        await self.drain(Deadline(0))
        await self._tasks.close()

    # --- care ---------------------------------------------------------------------------------------------

    async def _repeat(self, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await asyncio.sleep(jittered(every_s, 0.1))
            try:
                await work()
            except Unavailable as error:
                log.warning("streams could not be checked", error=str(error))

    async def _sweep(self) -> None:
        """Wake every stream whose log goes beyond what it has seen, or whose agent was archived; end those that have
        sent what a failover lost.
        """
        streams = [stream for stream in self._open if isinstance(stream, AgentStream)]
        lost = await self._lost_tails.among(self._db.acquire, [stream.place for stream in streams])
        for stream in streams:
            if stream.place.agent_id in lost:
                stream.end("lost")
        for start in range(0, len(streams), SWEEP_CHUNK):
            chunk = streams[start : start + SWEEP_CHUNK]
            agents = [stream.subscription.agent_id for stream in chunk]
            async with self._db.acquire() as conn:
                behind = set(await db.news(conn, agents, [stream.place.seen for stream in chunk]))
            for stream in chunk:
                if stream.subscription.agent_id in behind:
                    stream.subscription.wake()

    async def _check_rights(self) -> None:
        """End the streams whose key was revoked, or whose reader has no role in the project any more."""
        streams = list(self._open)
        readings = list({stream.reading for stream in streams})
        held: set[Reading] = set()
        for start in range(0, len(readings), SWEEP_CHUNK):
            async with self._db.acquire() as conn:
                held |= await db.still_readable(conn, readings[start : start + SWEEP_CHUNK])
        for stream in streams:
            if stream.reading not in held:
                stream.end("revoked")

    async def _tick(self) -> None:
        """Wake the streams that are due a heartbeat, and those whose last look into the log failed."""
        period_s = min(1.0, self.heartbeat_s / 4)
        while True:
            await asyncio.sleep(period_s)
            due = monotonic() - self.heartbeat_s + period_s
            for stream in self._open:
                if stream.retry:
                    stream.retry = False
                    stream.queue.wake()
                elif stream.written_at <= due:
                    stream.queue.tick()
