"""The sweep over machines that ran out of time: leases, calls that wait in vain, commands that nobody took.

It runs in every process with the maintenance role, without a leader: each part takes rows that it can lock at once
and leaves the others to whoever holds them. Source: machines.md §4 (timers, swept every second).
"""

from __future__ import annotations

import asyncio

from omnara.clock import Deadline, jittered
from omnara.db.fair_share import in_background
from omnara.engine.deps import Deps
from omnara.engine.machines.sweeps import Sweeper
from omnara.errors import Unavailable
from omnara.log import get_logger
from omnara.service import Tasks

__all__ = ["MachineSweep"]

log = get_logger(__name__)


class MachineSweep:
    """A `Service`."""

    name = "machine-sweep"

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start sweeping."""
        with in_background():
            self._tasks.spawn(self._sweep(), "machine-sweep")

    async def watch(self) -> None:
        """Raise what ended the sweep."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish: each part is one short transaction."""

    async def stop(self) -> None:
        """End the sweep; a transaction under way is rolled back and done by somebody else."""
        await self._tasks.close()

    async def _sweep(self) -> None:
        sweeper = Sweeper(self._deps)
        while True:
            await asyncio.sleep(jittered(self._deps.settings.machine_sweep_s))
            try:
                await sweeper.sweep()
            except Unavailable as error:
                log.warning("machines could not be swept", error=str(error))
