"""Releases the claims of workers that are not live: at every sweep, and at once when somebody was declared dead.

A standing sweep and not a reaction: a claim that committed while its worker was being declared dead is found by the
next round. Runs in every process that has an identity; no leader is needed.
Source: coordination §3.1; DESIGN §3 "Who is alive".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from omnara import probes
from omnara.clock import Deadline, jittered
from omnara.db.failures import DatabaseUnavailable
from omnara.engine.deps import Deps
from omnara.engine.recovery import RELEASE_BATCH, release_orphans
from omnara.log import get_logger
from omnara.service import Tasks

log = get_logger(__name__)


class OrphanSweep:
    """A `Service` that listens to the identity for deaths."""

    name = "orphans"

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._now = asyncio.Event()
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start sweeping."""
        self._tasks.spawn(self._sweep(), "orphans")

    async def watch(self) -> None:
        """Raise what ended the sweep."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish: a release is one short transaction."""

    async def stop(self) -> None:
        """End the sweep; a transaction under way is rolled back and done by somebody else."""
        await self._tasks.close()

    def attached(self, worker_id: UUID, *, is_new: bool) -> None:
        """Claims of an identity that this process had before may wait."""
        self._now.set()

    def detached(self) -> None:
        """The sweep goes on: it uses no session."""

    def declared_dead(self, worker_id: UUID) -> None:
        """This process's own old claims are orphans now."""
        self._now.set()

    def deaths(self, worker_ids: Sequence[UUID]) -> None:
        """Look at once."""
        self._now.set()

    async def _sweep(self) -> None:
        while True:
            try:
                async with asyncio.timeout(jittered(self._deps.settings.claim_sweep_s)):
                    await self._now.wait()
            except TimeoutError:
                pass
            self._now.clear()
            try:
                while True:
                    released = await release_orphans(self._deps, self._deps.settings.death_limit)
                    if released.agents:
                        probes.hit("orphans_released", agents=len(released.agents))
                    if len(released.agents) < RELEASE_BATCH:
                        break
            except DatabaseUnavailable as error:
                log.warning("orphan_sweep_unavailable", error=str(error))
