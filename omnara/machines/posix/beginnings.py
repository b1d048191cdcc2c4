"""Keepers on their way to a command: launched when it is prepared, told to begin when it is to be executed.

A keeper and the process that will be the command take longer to come about than a grant to be asked for, so both happen
at once. One that was not told to begin has done nothing, and goes when its connection is closed, also by our death.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

from omnara.log import get_logger
from omnara.machines.posix.keeper import files
from omnara.machines.posix.keeper.talk import message
from omnara.machines.posix.launcher import Launcher
from omnara.machines.posix.store import Store
from omnara.machines.posix.terms import Sandbox
from omnara.machines.posix.threads import at_once, in_thread
from omnara.machines.processes import HomeFull, HomeLost

__all__ = ["Beginnings", "Keeper"]

log = get_logger(__name__)

_MOST = 16
"""Four times what a channel offers at once: more than that does not come about while grants are on their way."""
_AFTER_S = 0.001
"""The grant is asked for first: whom a launch wakes may get the processor instead of us, for about a millisecond."""


class Keeper(NamedTuple):
    """The line to a keeper that waits for the word, and the sandbox (its first process) that it is ready for."""

    line: socket.socket
    sandbox: int | None


class Beginnings:
    """The keepers of one home that were not told to begin yet: at most 16 of them wait ahead of the word."""

    def __init__(self, store: Store, launcher: Launcher, sandbox: Sandbox | None) -> None:
        """Launch nothing yet. The launcher stays the caller's."""
        self._store = store
        self._launcher = launcher
        self._sandbox = sandbox
        self._ready: dict[str, asyncio.Task[Keeper | None]] = {}
        self._leaving: set[asyncio.Task[Keeper | None]] = set()

    def make_ready(self, process_id: str) -> None:
        """Have a keeper wait for a process that was prepared, in the background. If that fails, `take` will say why."""
        if process_id not in self._ready and len(self._ready) < _MOST:
            work = self._launched_if_possible(process_id)
            self._ready[process_id] = asyncio.create_task(work, name=f"keeper for {process_id}")

    async def take(self, process_id: str) -> Keeper | None:
        """Return a keeper that waits for the word; its line is the caller's. None: the command was begun already.

        Raises KeyError for an unknown process, HomeLost, HomeFull.
        """
        ready = await self._made_ready(process_id)
        if ready is not None:
            try:
                if ready.sandbox == await self._inside():
                    return ready
            except BaseException:
                ready.line.close()
                raise
            ready.line.close()
        return await self._launched(process_id)

    async def _made_ready(self, process_id: str) -> Keeper | None:
        task = self._ready.get(process_id)
        if task is None:
            return None
        await asyncio.wait((task,))
        # Whoever sent it away meanwhile has hung up.
        return task.result() if self._ready.pop(process_id, None) is task else None

    def send_away(self, process_id: str) -> None:
        """Let the keeper of a process that will not be executed go."""
        task = self._ready.pop(process_id, None)
        if task is not None:
            self._leaving.add(task)
            task.add_done_callback(self._hang_up)

    def _hang_up(self, task: asyncio.Task[Keeper | None]) -> None:
        self._leaving.discard(task)
        keeper = None if task.cancelled() else task.result()
        if keeper is not None:
            keeper.line.close()

    async def close(self) -> None:
        """Let all of them go."""
        for process_id in list(self._ready):
            self.send_away(process_id)
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _launched_if_possible(self, process_id: str) -> Keeper | None:
        await asyncio.sleep(_AFTER_S)
        try:
            return await self._launched(process_id)
        except (KeyError, HomeLost, HomeFull) as error:  # `take` tries again, and says it
            log.info("no keeper waits for a command", process_id=process_id, error=str(error))
            return None

    async def _inside(self) -> int | None:
        return None if self._sandbox is None else await self._sandbox.enter()

    async def _launched(self, process_id: str) -> Keeper | None:
        sandbox = await self._inside()
        ours, theirs = at_once(socket.socketpair)
        ours.send(message({"op": "ready", "sandbox": None if sandbox is None else {"pid": sandbox}}))
        ours.setblocking(False)
        try:
            begun = at_once(self._launch_at_once, process_id, theirs)
            if begun is None:
                begun = await self._launch_in_thread(process_id, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        if begun:
            ours.close()
            return None
        return Keeper(ours, sandbox)

    async def _launch_in_thread(self, process_id: str, connection: socket.socket) -> bool:
        launching = asyncio.ensure_future(in_thread(self._launch, process_id, connection))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            await asyncio.gather(launching, return_exceptions=True)  # it is using the descriptors, for a moment
            raise

    def _launch_at_once(self, process_id: str, connection: socket.socket) -> bool | None:
        """As `_launch`, but None where that would block: there is no fork server, or it has a lot to do."""
        with self._store.opened(process_id) as fd:
            if fd is None:
                raise KeyError(process_id)
            if files.read_bit(fd) is not None:
                return True
            return False if self._launcher.launch_at_once(fd, connection) else None

    def _launch(self, process_id: str, connection: socket.socket) -> bool:
        """Have a keeper started for what was not begun. True: it was. Blocks."""
        with self._store.opened(process_id) as fd:
            if fd is None:
                raise KeyError(process_id)
            if files.read_bit(fd) is not None:
                return True
            self._launcher.launch(fd, connection)
        return False
