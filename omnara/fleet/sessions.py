"""The channels that are open in this process: one per machine, woken by hints, looked at by one sweep for all.

A machine has one channel that counts. A new one displaces the old one in this process at once and in others through a
hint; a lost hint is made up for by the sweep, which also finds channels that another process has replaced.
Source: machines.md §3 (displacement, drain); DESIGN §3 (hints, shutdown).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.clock import Deadline, jittered
from omnara.db import fleet as db
from omnara.db.bus import Kind, LocalBus
from omnara.db.fair_share import in_background
from omnara.db.fleet import Channel
from omnara.engine.deps import Deps
from omnara.engine.machines import runtimes
from omnara.errors import Unavailable
from omnara.fleet.session import Session
from omnara.fleet.strays import Strays
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.machines.frames import FromDaemon, FromServer
from omnara.machines.link import Link
from omnara.service import Tasks

__all__ = ["Sessions"]

log = get_logger(__name__)

GOING_AWAY: Final = 1001
DISPLACED: Final = 1000
CLOSE_LIMIT_S: Final = 2.0
"""How long the end of a channel may take to be written down; the lease says it otherwise, a little later."""
FAREWELL_S: Final = 0.5
CHUNK: Final = 1_000


class Sessions:
    """A `Service` and the registry of open channels. `worker_id` tells this process's identity.

    `turns` bounds how much of what machines ask is at the database at once.
    """

    name = "channels"

    def __init__(self, deps: Deps, bus: LocalBus, worker_id: Callable[[], UUID]) -> None:
        self._deps = deps
        self._bus = bus
        self._worker_id = worker_id
        self._open: dict[str, Session] = {}  # by the text of the machine's id, as hints have it
        self._tasks = Tasks()
        self.turns = asyncio.Semaphore(max(1, deps.db.size - 1))
        self._strays = Strays()
        self._closing = False

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.asynccontextmanager
    async def channel(self, machine_id: UUID, runtime_id: UUID) -> AsyncIterator[Channel]:
        """Make a channel the machine's one that counts, for as long as the block runs; then it is noted as gone.

        Raises RuntimeUnregistered when the runtime is not the machine's current one, Unavailable.
        """
        if self._closing:
            raise Unavailable("the server is stopping")
        channel = Channel(runtime_id, new_uuid(), machine_id)
        await runtimes.open_channel(self._deps, machine_id, runtime_id, channel.session_id, self._worker_id())
        # An older channel of this machine, here or elsewhere, finds that it counts no more.
        self._deps.hints.machines((machine_id,))
        try:
            yield channel
        finally:
            await asyncio.shield(self._tasks.spawn(self._note_end(channel), "channel-end"))

    async def run(
        self,
        channel: Channel,
        link: Link[FromServer, FromDaemon],
        *,
        silence_s: float | None = None,
        coarse_s: float | None = None,
    ) -> None:
        """Serve a channel until it is over; an older one of the same machine in this process is closed first."""
        session = Session(self._deps, link, channel, self.turns, self._strays, silence_s=silence_s, coarse_s=coarse_s)
        key = str(channel.machine_id)
        served = self._deps.metrics.machine_channels.labels("socket" if coarse_s is None else "driven")
        served.inc()
        displaced = self._open.get(key)
        self._open[key] = session
        try:
            if displaced is not None:
                self._tasks.spawn(self._see_off(displaced, channel), "channel-displaced")
            if self._closing:
                await session.close(GOING_AWAY)
            probes.hit("channel_open", machine_id=channel.machine_id)
            await session.run()
        finally:
            served.dec()
            if self._open.get(key) is session:
                del self._open[key]
            probes.hit("channel_closed", machine_id=channel.machine_id)

    async def _see_off(self, displaced: Session, newer: Channel) -> None:
        """Close a channel that another one has displaced. One of another runtime is first told that that has ended."""
        if displaced.channel.runtime_id != newer.runtime_id:
            displaced.wake()
            await asyncio.sleep(FAREWELL_S)
        await displaced.close(DISPLACED)

    async def _note_end(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await runtimes.close_channel(self._deps, channel.runtime_id, channel.session_id)
        except (Unavailable, TimeoutError) as error:
            log.warning("the end of a machine's channel was not written", error=type(error).__name__)

    # --- service ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to listen for hints and to sweep."""
        with in_background():
            self._tasks.spawn(self._hear(), "channel-hints")
            self._tasks.spawn(self._sweep(), "channel-sweep")

    async def watch(self) -> None:
        """Raise what ended the listening or the sweep."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Close every channel at once: the machines connect elsewhere, and their commands run on."""
        await self._close_all()

    async def stop(self) -> None:
        """Close what is open and end hints and sweep."""
        await self._close_all()
        await self._tasks.close()

    async def _close_all(self) -> None:
        self._closing = True
        await asyncio.gather(*(session.close(GOING_AWAY) for session in list(self._open.values())))

    async def _hear(self) -> None:
        kinds = {Kind.MACHINES, Kind.COMMANDS}
        with self._bus.subscribe(kinds) as subscription:
            while True:
                batch = await subscription.get()
                if kinds & batch.everything:
                    for session in self._open.values():
                        session.wake()
                    continue
                for text in frozenset[str]().union(*batch.ids.values()):
                    found = self._open.get(text)
                    if found is not None:
                        found.wake()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(jittered(self._deps.settings.machine_drain_s))
            sessions = {session.channel.session_id: session for session in self._open.values()}
            channels = [session.channel for session in sessions.values()]
            try:
                for start in range(0, len(channels), CHUNK):
                    async with self._deps.db.acquire() as connection:
                        found = await db.channels_with_work(connection, channels[start : start + CHUNK])
                    for session_id in found:
                        sessions[session_id].wake()
            except Unavailable as error:
                log.warning("machines could not be swept", error=str(error))
