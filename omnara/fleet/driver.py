"""Which pool machines this process drives: claims them, gives them back, and takes over those of dead workers.

A claim on a machine is as a claim on an agent: it names a worker whose advisory lock tells that it lives, and a token.
It decides who drives; what a machine is allowed to do is decided by its runtime's statements alone, so two drivers for
a moment do no harm. Idle machines cost one statement every two seconds for all of them together.
Source: coordination §3 (claims and deaths), §6 (hints, sweeps).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.clock import Deadline, jittered, monotonic
from omnara.db import fleet as db
from omnara.db.bus import Kind, LocalBus
from omnara.db.connection import Connection
from omnara.db.fair_share import in_background
from omnara.db.fleet import Channel, MachineClaim
from omnara.engine.deps import Deps
from omnara.errors import Unavailable
from omnara.fleet.drive import Drive, Turns
from omnara.fleet.places import Places
from omnara.fleet.sessions import Sessions
from omnara.log import get_logger
from omnara.service import Tasks

__all__ = ["Driver"]

log = get_logger(__name__)

BATCH: Final = 64
RELEASE_BATCH: Final = 256
DRIVEN_LEASE_S: Final = 180.0
"""What tells that a driver is gone is its worker's death; the lease is for what nobody foresaw."""
AT_MOST_EVERY_S: Final = 0.1
STRAY_LOOKS: Final = 5


class Driver:
    """A `Service` that listens to the identity. `worker_id` tells this process's identity at the moment."""

    name = "driver"

    def __init__(
        self, deps: Deps, bus: LocalBus, sessions: Sessions, places: Places, worker_id: Callable[[], UUID]
    ) -> None:
        self._deps = deps
        self._bus = bus
        self._sessions = sessions
        self._places = places
        self._worker_id = worker_id
        self._tasks = Tasks()
        self._drives: dict[UUID, tuple[Drive, asyncio.Task[None]]] = {}
        self._channels: dict[UUID, Channel] = {}
        self._cooling: dict[UUID, float] = {}
        self._deaths = False
        self._now = asyncio.Event()
        self._turns = Turns()
        self._looks = 0
        self._stopping = False

    def __len__(self) -> int:
        return len(self._drives)

    # --- service ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to look for machines."""
        with in_background():
            self._tasks.spawn(self._hear(), "driver-hints")
            self._tasks.spawn(self._look_again(), "driver-looks")
            self._tasks.spawn(self._keep(), "driver-leases")

    async def watch(self) -> None:
        """Raise what ended the looking."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Let go of all machines at once, so that others drive them while the running steps end here."""
        await self._let_go_of_all()

    async def stop(self) -> None:
        """Let go of what is left and end."""
        await self._let_go_of_all()
        await self._tasks.close()

    # --- the identity -------------------------------------------------------------------------------------

    def attached(self, worker_id: UUID, *, is_new: bool) -> None:
        """Look at what there is to drive."""
        self._now.set()

    def detached(self) -> None:
        """What is driven is driven on: each grant needs the database, which knows whose machine it is."""

    def declared_dead(self, worker_id: UUID) -> None:
        """Somebody else drives these machines from now on."""
        for _, task in self._drives.values():
            task.cancel()
        self._deaths = True
        self._now.set()

    def deaths(self, worker_ids: Sequence[UUID]) -> None:
        """Take over at once."""
        self._deaths = True
        self._now.set()

    # --- looking ------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Look when there is word of a machine, but not for each word."""
        with self._bus.subscribe({Kind.MACHINES}) as subscription:
            while True:
                await subscription.get()
                self._now.set()
                await asyncio.sleep(AT_MOST_EVERY_S)

    async def _look_again(self) -> None:
        while True:
            try:
                async with asyncio.timeout(jittered(self._deps.settings.machine_drain_s)):
                    await self._now.wait()
            except TimeoutError:
                self._looks += 1
            self._now.clear()
            if self._stopping:
                return
            try:
                await self._look()
            except Unavailable as error:
                log.warning("machines could not be looked at", error=str(error))

    async def _look(self) -> None:
        """Release what dead workers held, let go of what is lost, take what nobody drives.

        Whoever declared a death may be dead as well before its channels are noted as gone, so every few looks that is
        looked for unasked, as is a claim whose answer was lost.
        """
        worker_id = self._worker_id()
        thorough = self._looks % STRAY_LOOKS == 1
        deaths, self._deaths = self._deaths, False
        async with self._deps.db.acquire() as connection:
            offline = []
            if deaths or thorough:
                offline = await db.disconnect_channels_of_the_dead(connection, RELEASE_BATCH)
            freed = await db.release_machines_of_the_dead(connection, RELEASE_BATCH)
            held = [drive.claim for drive, _ in self._drives.values()]
            lost = await db.lost_machines(connection, worker_id, held) if held else []
            stray: list[MachineClaim] = []
            if thorough:
                stray = await db.stray_machines(connection, worker_id, list(self._drives))
            taken = await self._claim(connection, worker_id)
        self._deps.hints.machines([*offline, *freed])
        await asyncio.gather(*(self._let_go(machine_id) for machine_id in lost))
        if stray:
            await self._give_back(stray)
        for claim in taken:
            self._drive(claim)

    async def _claim(self, connection: Connection, worker_id: UUID) -> list[MachineClaim]:
        reach = self._places.driven()
        now = monotonic()
        self._cooling = {machine_id: until for machine_id, until in self._cooling.items() if until > now}
        if not reach or self._stopping:
            return []
        taken = await db.claim_machines(connection, worker_id, secrets.randbits(63), BATCH, reach, list(self._cooling))
        if len(taken) == BATCH:
            self._now.set()
        return taken

    # --- driving ------------------------------------------------------------------------------------------

    def _drive(self, claim: MachineClaim) -> None:
        if self._stopping:
            self._tasks.spawn(self._give_back([claim]), "driver-release")
            return
        drive = Drive(self._deps, claim, self._sessions, self._places, self._turns, self._opened)
        task = self._tasks.spawn(self._run(drive), f"drive {claim.machine_id}")
        self._drives[claim.machine_id] = (drive, task)
        probes.hit("machine_claimed", machine_id=claim.machine_id)

    async def _run(self, drive: Drive) -> None:
        """Drive until that ends by itself, and give the claim back. Whoever cancels gives it back, or has no claim."""
        claim = drive.claim
        cool_s = await drive.run()
        self._forget(claim)
        self._cooling[claim.machine_id] = monotonic() + cool_s
        await self._give_back([claim])

    def _opened(self, channel: Channel) -> None:
        self._channels[channel.machine_id] = channel
        self._tasks.spawn(self._extend([channel]), "driver-lease")

    def _forget(self, claim: MachineClaim) -> None:
        found = self._drives.get(claim.machine_id)
        if found is not None and found[0].claim == claim:
            del self._drives[claim.machine_id]
            self._channels.pop(claim.machine_id, None)

    async def _let_go(self, machine_id: UUID) -> None:
        """Stop driving a machine, now, and give back what claim there still is."""
        found = self._drives.get(machine_id)
        if found is None:
            return
        drive, task = found
        task.cancel()
        await asyncio.wait((task,))
        self._forget(drive.claim)
        await self._give_back([drive.claim])

    async def _let_go_of_all(self) -> None:
        self._stopping = True
        self._now.set()
        drives = list(self._drives.values())
        for _, task in drives:
            task.cancel()
        if not drives:
            return
        await asyncio.wait([task for _, task in drives])
        self._drives.clear()
        self._channels.clear()
        await self._give_back([drive.claim for drive, _ in drives])

    async def _give_back(self, claims: Sequence[MachineClaim]) -> None:
        """Release claims as far as they still are ours, and say so. What fails here is found as stray later."""
        try:
            async with self._deps.db.acquire() as connection:
                freed = await db.release_machines(connection, self._worker_id(), claims)
        except Unavailable as error:
            log.warning("machines could not be given back", error=str(error))
            return
        if freed:
            self._deps.hints.machines(freed)

    # --- leases -------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(jittered(DRIVEN_LEASE_S / 3))
            await self._extend(list(self._channels.values()))

    async def _extend(self, channels: Sequence[Channel]) -> None:
        if not channels:
            return
        try:
            async with self._deps.db.acquire() as connection:
                await db.extend_driven(connection, channels, DRIVEN_LEASE_S)
        except Unavailable as error:
            log.warning("the leases of driven machines were not extended", error=str(error))
