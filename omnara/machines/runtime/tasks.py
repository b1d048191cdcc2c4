"""The owner of background tasks of the runtime: cancels and awaits them, and hands their first failure on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["Tasks"]


class Tasks:
    """Tasks with one owner. Apart from `service.Tasks` a failure is handed over once, and the owner goes on after it.

    A home that was away fails what is under way; the next connection begins anew with the same owner.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._failed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._error is None:
            self._error = error
            self._failed.set()

    async def watch(self) -> None:
        """Wait until a task fails, and raise its error; forever if none does. Each failure is raised once."""
        await self._failed.wait()
        self.take_failure()

    def take_failure(self) -> None:
        """Raise the failure that nobody has seen yet, if there is one."""
        error, self._error = self._error, None
        self._failed.clear()
        if error is not None:
            raise error

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
