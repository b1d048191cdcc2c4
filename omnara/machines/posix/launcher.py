"""Starts keepers through the fork server, and the fork server when there is none."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

from omnara.descriptors import BEGUN_WITH
from omnara.settings import interpreter_environment

__all__ = ["Launcher"]

_HERE = Path(__file__).resolve().parent
_PROGRAM = (
    "import sys, socket; sys.path.insert(0, sys.argv[2]); "
    "from keeper import server; server.serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3]), sys.argv[4])"
)


class Launcher:
    """One fork server, shared by all homes of this process. Its keepers stay when it goes.

    `launch` may be called from any thread.
    """

    def __init__(self, *, login_keys: bool = True) -> None:
        """Start nothing yet. `login_keys`: whether commands have the session keyring that this process has (Linux)."""
        self._keys = "all" if login_keys else "none"
        self._guard = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._closed = False

    def launch(self, directory: int, connection: socket.socket) -> None:
        """Have a keeper started for an open process directory. Blocks for a moment. Raises OSError.

        Both descriptors stay the caller's. A keeper that found nothing to do, or that died, closes the connection.
        """
        passed = array.array("i", [connection.fileno(), directory])
        with self._guard:
            for attempt in range(2):
                try:
                    self._running().sendmsg([b"k"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
                except OSError:
                    self._stop()
                    if attempt:
                        raise
                else:
                    return

    def launch_at_once(self, directory: int, connection: socket.socket) -> bool:
        """Do the same if that takes no time; False when `launch` has to. For the event loop."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._server is None or self._server.poll() is not None or self._line is None:
                return False
            room = select.poll()
            room.register(self._line, select.POLLOUT)
            if not any(events & select.POLLOUT for _, events in room.poll(0)):
                return False
            passed = array.array("i", [connection.fileno(), directory])
            self._line.sendmsg([b"k"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        except OSError:
            return False
        finally:
            self._guard.release()
        return True

    def warm(self) -> None:
        """Start the fork server if there is none, without need: where that fails, `launch` will say so."""
        with self._guard, contextlib.suppress(OSError):
            self._running()

    def _running(self) -> socket.socket:
        if self._closed:  # by somebody who does not wait for threads that are still at it
            raise OSError("no command is started any more")
        if self._line is not None and self._server is not None and self._server.poll() is None:
            return self._line
        self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            told = [str(theirs.fileno()), str(_HERE), str(BEGUN_WITH), self._keys]
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *told],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=interpreter_environment(),
                start_new_session=True,
            )
        ours.settimeout(10)
        self._line = ours
        return ours

    @property
    def pid(self) -> int | None:
        """The fork server's process, while there is one."""
        return None if self._server is None else self._server.pid

    def _stop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, 9) if self._server.poll() is None else None
            self._server.wait()
            self._server = None

    def close(self) -> None:
        """End the fork server and wait for it; there will be no other. Commands go on. Blocks for a moment."""
        with self._guard:
            self._closed = True
            self._stop()
