"""Keepers on their way to a command: launched when it is prepared, told to begin when it is to be executed.

A keeper and the process that will be the command take longer to come about than a grant to be asked for, so both happen
at once. One that was not told to begin has done nothing, and goes when its connection is closed, also by our death.
"""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

from omnara.machines.posix.keeper import files
from omnara.machines.posix.keeper.talk import message
from omnara.machines.posix.launcher import Launcher
from omnara.machines.posix.store import Store
from omnara.machines.posix.terms import Sandbox
from omnara.machines.posix.threads import in_thread
from omnara.machines.processes import HomeFull, HomeLost

__all__ = ["Beginnings", "Keeper"]

_MOST = 16


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
        self._ready: dict[str, Keeper] = {}

    async def make_ready(self, process_id: str) -> None:
        """Have a keeper wait for a process that was prepared. Where that fails, taking it will say why."""
        if process_id in self._ready or len(self._ready) >= _MOST:
            return
        with contextlib.suppress(KeyError, HomeLost, HomeFull):
            keeper = await self._launched(process_id)
            if keeper is not None:
                self.send_away(process_id)
                self._ready[process_id] = keeper

    async def take(self, process_id: str) -> Keeper | None:
        """Return a keeper that waits for the word; its line is the caller's. None: the command was begun already.

        Raises KeyError for an unknown process, HomeLost, HomeFull.
        """
        ready = self._ready.pop(process_id, None)
        if ready is not None:
            if ready.sandbox == await self._inside():
                return ready
            ready.line.close()
        return await self._launched(process_id)

    def send_away(self, process_id: str) -> None:
        """Let the keeper of a process that will not be executed go."""
        ready = self._ready.pop(process_id, None)
        if ready is not None:
            ready.line.close()

    def close(self) -> None:
        """Let all of them go."""
        for process_id in list(self._ready):
            self.send_away(process_id)

    async def _inside(self) -> int | None:
        return None if self._sandbox is None else await self._sandbox.enter()

    async def _launched(self, process_id: str) -> Keeper | None:
        sandbox = await self._inside()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                ours.send(message({"op": "ready", "sandbox": None if sandbox is None else {"pid": sandbox}}))
                ours.setblocking(False)
                begun = await in_thread(self._launch, process_id, theirs)
        except BaseException:
            ours.close()
            raise
        if begun:
            ours.close()
            return None
        return Keeper(ours, sandbox)

    def _launch(self, process_id: str, connection: socket.socket) -> bool:
        """Have a keeper started for what was not begun. True: it was. Blocks."""
        with self._store.opened(process_id) as fd:
            if fd is None:
                raise KeyError(process_id)
            if files.read_bit(fd) is not None:
                return True
            self._launcher.launch(fd, connection)
        return False
