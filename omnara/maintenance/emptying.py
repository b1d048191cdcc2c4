"""Empties deleted projects, in every process that has a worker or does maintenance: no leader is needed."""

from __future__ import annotations

import asyncio
from typing import Final

from omnara.clock import Deadline, jittered
from omnara.engine.deps import Deps
from omnara.engine.emptying import empty_projects
from omnara.errors import Unavailable
from omnara.log import get_logger
from omnara.service import Tasks

log = get_logger(__name__)

LOOK_S: Final = 2.0
"""Between two looks; one costs a read of an index that is nearly always empty."""


class Emptying:
    """A `Service`."""

    name = "emptying"

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start looking."""
        self._tasks.spawn(self._loop(), "emptying")

    async def watch(self) -> None:
        """Raise what ended the loop."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Nothing to finish: each agent is one short transaction."""

    async def stop(self) -> None:
        """End the loop; what is left is somebody else's, or waits."""
        await self._tasks.close()

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(jittered(LOOK_S))
            try:
                await empty_projects(self._deps)
            except Unavailable as error:
                log.warning("emptying_failed", error=str(error))
