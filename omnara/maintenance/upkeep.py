"""Keeps the hot table small, the gauges of the whole installation true, and files that nobody refers to away.

The leader is whoever gets the lock this time: it is tried, never waited for, on a connection made for the moment, so
that a vacuum never delays a claim.
Source: coordination §3.2 (vacuum each 10 s), §1.3 (leader lock by polling); DESIGN §9 (hot table stays flat).
"""

from __future__ import annotations

import asyncio

from omnara import probes
from omnara.clock import Deadline, jittered
from omnara.db import sched, upkeep, workers
from omnara.db.connection import Connection, ConnectSettings
from omnara.db.failures import DatabaseUnavailable
from omnara.engine import artifacts_sweep
from omnara.engine.deps import Deps
from omnara.errors import Unavailable
from omnara.log import get_logger
from omnara.service import Tasks

log = get_logger(__name__)

GAUGES_S = 5.0
STATUS_GAUGE_S = 60.0
FILES_S = 300.0
FILES_KEPT_S = 3600.0
"""How long a content waits for the message or result that it was sent with. The two are written within seconds."""


class Upkeep:
    """A `Service`: vacuum by whoever leads, gauges in every process with the maintenance role."""

    name = "upkeep"

    def __init__(self, deps: Deps, database: ConnectSettings) -> None:
        self._deps = deps
        self._database = database
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start the loops."""
        self._tasks.spawn(self._vacuum_loop(), "vacuum")
        self._tasks.spawn(self._gauge_loop(), "gauges")
        self._tasks.spawn(self._files_loop(), "files")

    async def watch(self) -> None:
        """Raise what ended a loop."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish."""

    async def stop(self) -> None:
        """End both loops; a vacuum under way is cancelled by its closed connection."""
        await self._tasks.close()

    async def _vacuum_loop(self) -> None:
        every_s = self._deps.settings.vacuum_s
        while True:
            await asyncio.sleep(jittered(every_s))
            try:
                if await upkeep.vacuum_once(self._database, every_s * 0.8):
                    probes.hit("vacuumed")
            except DatabaseUnavailable as error:
                log.warning("vacuum_failed", error=str(error))

    async def _files_loop(self) -> None:
        """Remove files and contents that nothing came to refer to. Several processes may at a time."""
        while True:
            await asyncio.sleep(jittered(FILES_S))
            try:
                while await artifacts_sweep.sweep_loose_files(self._deps.db, FILES_KEPT_S):
                    probes.hit("loose_files_settled")
                while await self._deps.blobs.sweep(self._deps.db, FILES_KEPT_S):
                    probes.hit("files_removed")
            except Unavailable as error:
                log.warning("file_sweep_failed", error=str(error))

    async def _gauge_loop(self) -> None:
        passed = STATUS_GAUGE_S
        while True:
            try:
                async with self._deps.db.acquire() as connection:
                    await self._read_gauges(connection)
                    if passed >= STATUS_GAUGE_S:
                        passed = 0.0
                        for status, count in (await sched.agents_by_status(connection)).items():
                            self._deps.metrics.agents.labels(status).set(count)
            except DatabaseUnavailable as error:
                log.debug("gauges_unavailable", error=str(error))
            await asyncio.sleep(jittered(GAUGES_S))
            passed += GAUGES_S

    async def _read_gauges(self, connection: Connection) -> None:
        metrics = self._deps.metrics
        depth, oldest_s = await sched.queue_depth(connection)
        metrics.ready_agents.set(depth)
        metrics.ready_oldest_s.set(oldest_s)
        orphans, orphaned_s = await upkeep.orphans(connection)
        metrics.orphaned_agents.set(orphans)
        metrics.orphaned_oldest_s.set(orphaned_s)
        metrics.workers_alive.set(await workers.workers_alive(connection))
        metrics.oldest_xmin_s.set(await upkeep.oldest_xmin_s(connection))
        metrics.notify_queue_ratio.set(await upkeep.notify_queue_ratio(connection))
