"""The fork server: a small process that starts keepers in a fraction of a millisecond each.

A fresh interpreter for each command would cost twenty times the command. It lives as long as whoever started it: when
the line to it closes, it goes; its keepers stay.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from typing import NoReturn

from . import keep

__all__ = ["serve"]

_FAULT = "fault.txt"


def serve(line: socket.socket) -> None:
    """Fork a keeper for each byte that arrives with two descriptors: a connection, and a process's directory."""
    os.umask(0o077)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    while True:
        data, passed, _, _ = socket.recv_fds(line, 1, 2)
        if not data:
            return
        if len(passed) == 2 and os.fork() == 0:
            line.close()
            _keep(*passed)
        for fd in passed:
            os.close(fd)


def _keep(connection: int, directory: int) -> NoReturn:
    """Be a keeper, and never anything else. A fault of ours is left beside the process's files."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (connection, directory):
            os.set_inheritable(fd, False)
        keep.keep(directory, socket.socket(fileno=connection))
    except BaseException:  # noqa: BLE001 - a forked process must end here, whatever it was
        _leave_word(directory)
    finally:
        os._exit(0)


def _leave_word(directory: int) -> None:
    fd = os.open(_FAULT, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    os.write(fd, traceback.format_exc().encode(errors="replace"))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
