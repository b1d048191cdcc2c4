"""Makes, replaces, wakes and removes pool machines, and looks after what is left of them.

Runs in every process that drives machines, without a leader: what is to be done is a state of a machine's row, and
whoever claims the row does it. Hints make it fast; a look each second makes it certain. Source: machines.md §12, §13.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.clock import Deadline, jittered, monotonic
from omnara.db import provisioning as db
from omnara.db.bus import Kind, LocalBus
from omnara.db.fair_share import in_background
from omnara.db.fleet import MachineClaim
from omnara.engine.deps import Deps
from omnara.engine.machines import idle, provisioning
from omnara.engine.machines.provisioning import Times
from omnara.errors import Unavailable
from omnara.fleet.own_daemons import OwnDaemons
from omnara.fleet.provision_jobs import Jobs
from omnara.fleet.reached import Reached
from omnara.ids import IdKind, InvalidPublicId, decode
from omnara.log import get_logger
from omnara.machines.providers.owned import Owned, SweptProvider
from omnara.machines.providers.protocol import HomeProvider, ProviderUnavailable
from omnara.service import Tasks

__all__ = ["Provisioner"]

log = get_logger(__name__)

CONCURRENCY: Final = 8
"""Source: machines.md §12."""
ORPHANS_AT_ONCE: Final = 5
"""Removed in one round: a mistake about what is ours must not empty an engine."""
AT_MOST_EVERY_S: Final = 0.05


class Provisioner:
    """A `Service`. Start it before the driver and stop it after: the places are closed with it."""

    name = "provisioner"

    def __init__(
        self, deps: Deps, bus: LocalBus, reached: Reached, worker_id: Callable[[], UUID], times: Times
    ) -> None:
        self._deps = deps
        self._bus = bus
        self._reached = reached
        self._worker_id = worker_id
        self._times = times
        self._jobs = Jobs(deps, reached, times)
        self._own_daemons = OwnDaemons(deps, reached, times)
        self._tasks = Tasks()
        self._running: set[asyncio.Task[None]] = set()
        self._now = asyncio.Event()
        self._suspects: dict[str, set[str]] = {}
        self._refresh_at = monotonic()
        self._stopping = False

    async def start(self) -> None:
        """Begin to look for what is to be done."""
        with in_background():
            self._tasks.spawn(self._hear(), "provisioner-hints")
            self._tasks.spawn(self._look_again(), "provisioner-looks")
            self._tasks.spawn(self._every(self._times.observe_s, self._observe), "provisioner-observe")
            self._tasks.spawn(self._every(self._times.observe_s, self._own_daemons.look), "provisioner-daemons")
            self._tasks.spawn(self._every(self._times.upkeep_s, self._keep_up), "provisioner-upkeep")

    async def watch(self) -> None:
        """Raise what ended a loop."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Claim nothing more, and let the calls under way end: what they make is then written down."""
        self._stopping = True
        running = list(self._running)
        if running:
            await asyncio.wait(running, timeout=deadline.remaining_s)

    async def stop(self) -> None:
        """End all; what was begun is adopted by the next attempt, once the claim has lapsed."""
        self._stopping = True
        await self._tasks.close()
        await self._reached.close()

    # --- loops --------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        with self._bus.subscribe({Kind.MACHINES}) as subscription:
            while True:
                await subscription.get()
                self._now.set()
                await asyncio.sleep(AT_MOST_EVERY_S)

    async def _look_again(self) -> None:
        while not self._stopping:
            try:
                async with asyncio.timeout(jittered(self._times.look_s)):
                    await self._now.wait()
            except TimeoutError:
                pass
            self._now.clear()
            await self._guarded(self._look)

    async def _every(self, interval_s: float, round_: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping:
            await self._guarded(round_)
            await asyncio.sleep(jittered(interval_s))

    async def _guarded(self, round_: Callable[[], Awaitable[None]]) -> None:
        try:
            await round_()
        except (Unavailable, ProviderUnavailable) as error:
            log.warning("machines could not be looked after", error=str(error))

    # --- making, removing, waking -------------------------------------------------------------------------

    async def _look(self) -> None:
        """Claim what this process has hands for, and begin with it."""
        if monotonic() >= self._refresh_at:
            self._refresh_at = monotonic() + self._times.unavailable_s
            await self._reached.refresh()
        reach, free = self._reached.reach(), CONCURRENCY - len(self._running)
        if not reach:
            return
        async with self._deps.db.acquire() as connection:
            if free > 0:
                due = await provisioning.claim_due(connection, self._worker_id(), reach, self._times, free)
                for machine in due:
                    self._begin(self._jobs.run(machine), f"provision {machine.id}")
            for machine in await idle.claim_wakes(connection, reach, self._times):
                self._begin(self._jobs.wake(machine), f"wake {machine.id}")

    def _begin(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = self._tasks.spawn(run(), name)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._now.set()

    # --- looking after ------------------------------------------------------------------------------------

    async def _observe(self) -> None:
        """Replace driven machines whose container ended while nobody spoke to it, and put idle ones to sleep."""
        for name, host in self._reached.reach():
            provider = self._reached.provider(name)
            async with self._deps.db.acquire() as connection:
                driven = await db.driven_here(connection, self._worker_id(), name, host)
            if driven and isinstance(provider, SweptProvider):
                try:
                    alive = await provider.running(str(await self._reached.installation()))
                except ProviderUnavailable as error:
                    self._reached.lose(name, error)
                    raise
                for machine in driven:
                    if machine.resource_id not in alive:
                        await self._reached.mend(MachineClaim(machine.id, machine.claim_token, machine.generation))
        await self._lull()

    async def _lull(self) -> None:
        names = [name for name, _ in self._reached.driven()]
        for machine_id in await idle.sleepy(self._deps, names):
            machine = await idle.fall_asleep(self._deps, machine_id, names)
            if machine is None or machine.resource_id is None:
                continue
            self._deps.hints.machines((machine_id,))
            async with self._reached.asking(machine) as (provider, spec):
                assert isinstance(provider, HomeProvider), "the others' daemons go to sleep themselves"
                await provider.sleep(spec, machine.resource_id)
                async with self._deps.db.acquire() as connection:
                    awake = await db.is_awake(connection, machine)
                if awake:  # whoever woke it did so before it slept
                    await provider.wake(spec, machine.resource_id)
            probes.hit("machine_asleep", machine_id=machine_id)

    async def _keep_up(self) -> None:
        """Let idle machines go, and remove what no machine has any more."""
        await idle.remove_idle(self._deps, self._times)
        for name, _ in self._reached.reach():
            provider = self._reached.provider(name)
            if isinstance(provider, SweptProvider):
                await self._remove_orphans(name, provider)

    async def _remove_orphans(self, name: str, provider: SweptProvider) -> None:
        """Remove a few things of ours whose machine is deleted or unknown, and was at the place's last look as well."""
        owned = await provider.owned(str(await self._reached.installation()))
        machines = {thing.machine_id: _machine_id(thing) for thing in owned}
        async with self._deps.db.acquire() as connection:
            live = await db.live_machines(connection, {found for found in machines.values() if found is not None})
        orphans = [thing for thing in owned if machines[thing.machine_id] not in live]
        confirmed = [thing for thing in orphans if thing.resource_id in self._suspects.get(name, ())]
        self._suspects[name] = {thing.resource_id for thing in orphans}
        for thing in confirmed[:ORPHANS_AT_ONCE]:
            log.warning("an orphan is removed", kind=thing.kind, resource=thing.resource_id, machine=thing.machine_id)
            await provider.discard(thing)
            probes.hit("orphan_removed", resource=thing.resource_id)


def _machine_id(thing: Owned) -> UUID | None:
    try:
        return decode(IdKind.MACHINE, thing.machine_id)
    except InvalidPublicId:
        return None
