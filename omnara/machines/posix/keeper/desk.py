"""Where a keeper is asked things: its socket, those who wait for an answer, and what they wait for."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from .talk import CONTROL, Connection

__all__ = ["Desk"]

_CONNECTIONS = 64
_ONLY_THE_END = 1 << 62


class Desk:
    """Accepts connections and hands requests to `handle`. Bounded: more than 64 at once are turned away."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Callable[[Connection, dict[str, Any], bytes], None],
    ) -> None:
        """Be found nowhere yet: no file is touched before `open`."""
        self._selector = selector
        self._handle = handle
        self._connections: set[Connection] = set()
        self._watching: dict[Connection, int] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._named = False

    def open(self) -> None:
        """Be found in the current directory from now on. For whoever holds the lock: a name that is there is of one who
        died. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(CONTROL)
        self._listener.bind(CONTROL)
        self._named = True
        self._listener.listen(_CONNECTIONS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self.add(Connection(self._listener.accept()[0]))

    def add(self, connection: Connection) -> None:
        """Take in a connection."""
        if len(self._connections) >= _CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: Connection) -> None:
        if not connection.open:
            return
        fd = connection.socket.fileno()
        request = connection.receive()
        if not connection.open:
            self._forget(connection, fd)
        elif request is not None:
            self._handle(connection, *request)

    def _forget(self, connection: Connection, fd: int) -> None:
        self._selector.unregister(fd)
        self._connections.discard(connection)
        self._watching.pop(connection, None)

    def answer(self, connection: Connection, answer: dict[str, Any]) -> None:
        """Answer and hang up; whoever hung up before is not told."""
        if connection.open:
            self._forget(connection, connection.socket.fileno())
            connection.answer(answer)

    def watch(self, connection: Connection, known: int | None) -> None:
        """Let somebody wait for output beyond what is known to them, or (None) only for the end."""
        self._watching[connection] = _ONLY_THE_END if known is None else known

    def tell_output(self, end: int) -> None:
        """Answer those who know less output than there is."""
        for connection, known in list(self._watching.items()):
            if end > known:
                self.answer(connection, {"event": "output"})

    def leave(self) -> None:
        """Take the socket's name away: from here on nobody new comes, and no file is touched any more."""
        if self._named:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(CONTROL)

    def close(self) -> None:
        """Tell those who watch that the command is over, and hang up on everybody."""
        for connection in list(self._connections):
            if connection in self._watching:
                self.answer(connection, {"event": "exit"})
            connection.close()
        self._listener.close()  # whoever came too late to be taken in is not kept waiting for the disk
