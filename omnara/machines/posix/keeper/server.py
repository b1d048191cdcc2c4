"""The fork server: a small process that has keepers ready before they are needed.

A fresh interpreter for each command would cost twenty times the command, and even a fork costs as much as the shell.
So a few forked processes wait on the line; whichever takes a job becomes its keeper, and another takes its place.
All of them live as long as whoever started them: when the line closes they go, but keepers stay.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import selectors
import signal
import socket
import struct
import traceback
from datetime import UTC, datetime
from typing import NoReturn

from . import identity, job, namespaces
from .talk import Connection, message

__all__ = ["serve"]

_FAULT = "fault.txt"
_SPARE = 2
_MOST = 64
"""More descriptors than a fork server has: standard ones, its line, two pipes, and what imported modules hold open."""
_PID = struct.Struct("=i")


def serve(line: socket.socket, open_files: int | None = None, keys: str = "") -> None:
    """Turn each byte that arrives with two descriptors, a connection and a process's directory, into a keeper.

    `open_files`: the soft limit for commands, which is not the one that a server has raised for itself. `keys`: "none"
    when commands have no business with those of the login. One that runs since before an update of these files tells
    neither.
    """
    os.umask(0o077)
    # Whoever started us may wait for signals in its own way: without SIGCHLD nobody would see a command end.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before if open_files is None else open_files, most))
    # What commands leave running has us as its parent, and no process 1 that may not reap, as a server in a container.
    namespaces.adopt_orphans()
    if keys == "none":
        # Where it cannot be had, each confined command tries for itself, and says why it cannot be started.
        with contextlib.suppress(OSError):
            namespaces.leave_keyring()
    line = _lowest(line)
    hear, tell = os.pipe()
    died, dies = os.pipe()
    for fd in (hear, died, dies):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(dies, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()
    spare: set[int] = set()
    waiting = select.poll()
    waiting.register(hear, select.POLLIN)
    waiting.register(died, select.POLLIN)
    waiting.register(line, getattr(select, "POLLRDHUP", 0))  # a hang-up is told in any case
    while True:
        while len(spare) < _SPARE:
            spare.add(_fork(line, tell))
        if any(fd == line.fileno() for fd, _ in waiting.poll()):
            return
        spare -= _taken(hear)
        _drain(died)
        spare -= _reaped()


def _lowest(line: socket.socket) -> socket.socket:
    """Give the line the lowest free number, which no program inherits: it came with a number of its sender's choice."""
    with line:
        return socket.socket(fileno=os.dup(line.fileno()))


def _taken(hear: int) -> set[int]:
    """Who took a job. Each writes its number at once, so that none is cut."""
    data = _drain(hear)
    return {pid for (pid,) in _PID.iter_unpack(data)}


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _reaped() -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.add(pid)
    return found


def _fork(line: socket.socket, tell: int) -> int:
    pid = os.fork()
    if pid == 0:
        _wait(line, tell)
    return pid


def _wait(line: socket.socket, tell: int) -> NoReturn:
    """Wait for a job, then be a keeper, and never anything else. A fault of ours is left with the process's files."""
    directory: int | None = None
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _rehearse()
        data, passed, _, _ = socket.recv_fds(line, 1, 2)
        if data and len(passed) == 2:
            os.write(tell, _PID.pack(os.getpid()))
            _close_all_but(passed)
            connection, directory = passed
            job.do(directory, socket.socket(fileno=connection))
    except BaseException:  # noqa: BLE001 - a forked process must end here, whatever it was
        _leave_word(directory)
    finally:
        os._exit(0)


def _rehearse() -> None:
    """Do once, while nobody waits, what a keeper does first: a forked process pays for each page that it touches."""
    datetime.now(UTC).strftime("%f")
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as selector:
        connection = Connection(ours)
        selector.register(ours, selectors.EVENT_READ)
        theirs.send(message({"op": "watch", "end": 0}))
        selector.select(0)
        connection.receive()
        connection.tell({"event": "committed"})
    identity.start_time(os.getpid())
    identity.boot_id()


def _close_all_but(kept: list[int]) -> None:
    """A keeper has nothing of the fork server's, and gives nothing of its own to commands."""
    low, high = sorted(kept)
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, high + _MOST)
    for fd in kept:
        os.set_inheritable(fd, False)


def _leave_word(directory: int | None) -> None:
    if directory is not None:
        fd = os.open(_FAULT, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        os.write(fd, traceback.format_exc().encode(errors="replace"))
