"""Small files that are whole or absent, and that can be finished on a full disk.

Whatever must be written *after* an effect (how a command ended, what came of an action) is written over room that was
taken before the effect, so that a disk which filled up meanwhile loses no outcome. So is the execution bit. It is also
the quick way: what is written over a file's own blocks is durable without anything said to the file system's journal.
A process has one such file, with a block for what never changes, one for the bit and one for the end: a new file is
what costs most of all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

__all__ = [
    "LAUNCH",
    "PROCESS",
    "action_file",
    "check_room",
    "create_pair",
    "fill_bit",
    "fill_pair",
    "fresh_files",
    "held",
    "is_full",
    "read_bit",
    "read_exit",
    "read_json",
    "read_meta",
    "read_pair",
    "take_bit",
    "try_lock",
    "write_exit",
    "write_file",
]

LAUNCH = "launch.json"
PROCESS = "process"
"""Locked by the keeper. Three blocks: what never changes about the process, the execution bit, and how it ended."""
_BLOCK = 4096
_META, _BIT, _EXIT = 0, _BLOCK, 2 * _BLOCK
_HALF = _BLOCK // 2
_NOT_TAKEN = b" " * _BLOCK


def is_full(error: OSError) -> bool:
    """Tell whether the disk is used up, or the quota on it, or what whoever started us lets a file grow to."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def action_file(action_id: str) -> str:
    """Return the name of an action's record."""
    return f"action-{action_id}"


def fresh_files(directory: int, launch: bytes, meta: dict[str, Any]) -> None:
    """Fill a new directory that nobody else sees yet, durably, with what is known and the room for what comes later.

    Both files are on their way to the disk before the first is waited for, so that they cost little more than one.
    """
    opened = []
    try:
        for name, data in ((LAUNCH, launch), (PROCESS, _padded(meta, _BLOCK) + _NOT_TAKEN + b" " * _BLOCK)):
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=directory)
            opened.append(fd)
            _write_all(fd, data)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # begins to write, and waits for nothing
        for fd in (*opened, directory):
            os.fsync(fd)
    finally:
        for fd in opened:
            os.close(fd)


def write_file(directory: int, name: str, data: bytes) -> None:
    """Create a file that must not be there yet, only for the owner's eyes, and make its content durable."""
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_json(directory: int, name: str) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None when it is not there."""
    data = _read(directory, name)
    return None if data is None else json.loads(data)


def _read(directory: int, name: str, block: int | None = None) -> bytes | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return None
    with open(fd, "rb", buffering=0) as file:
        return file.read() if block is None else os.pread(fd, _BLOCK, block)


def read_meta(directory: int) -> dict[str, Any] | None:
    """Return what never changes about a process; None when it is not there. Raises ValueError for what is damaged."""
    data = _read(directory, PROCESS, _META)
    return None if data is None else json.loads(data)


def create_pair(directory: int, name: str, first: dict[str, Any]) -> None:
    """Create, durably and once, a record of two halves: `first`, and room for what is known only later.

    Raises FileExistsError when somebody was here before; then nothing was changed.
    """
    write_file(directory, name, _padded(first, _HALF) + b" " * _HALF)
    os.fsync(directory)


def fill_pair(directory: int, name: str, second: dict[str, Any]) -> None:
    """Write the second half of a record over the room that is there for it."""
    _overwrite(directory, name, _padded(second, _HALF), _HALF)


def read_pair(directory: int, name: str) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return both halves of a record; None for what was never created. A half that is not whole counts as absent."""
    data = _read(directory, name)
    return None if data is None else (_parsed(data[:_HALF]) or {}, _parsed(data[_HALF:]))


def read_bit(directory: int) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return both halves of the execution bit; None while nobody has taken it. A damaged one counts as taken."""
    data = _read(directory, PROCESS, _BIT)
    if data is None or data == _NOT_TAKEN:
        return None
    return _parsed(data[:_HALF]) or {}, _parsed(data[_HALF:])


def check_room(directory: int) -> None:
    """Raise the OSError of a full disk when it is full: room for the bit is no room for a command's output."""
    room = os.fstatvfs(directory)
    left = room.f_bfree if os.geteuid() == 0 else room.f_bavail
    if room.f_blocks > 0 and left == 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def take_bit(directory: int, first: dict[str, Any], second: dict[str, Any] | None = None) -> None:
    """Take the execution bit, durably and once. The caller holds the lock. Raises FileExistsError when it is taken.

    `second`: what is known of the command's process by now; `fill_bit` adds it later.
    """
    if read_bit(directory) is not None:
        raise FileExistsError("the execution bit is taken")
    data = _padded(first, _HALF) + (b"" if second is None else _padded(second, _HALF))
    _overwrite(directory, PROCESS, data, _BIT)


def fill_bit(directory: int, second: dict[str, Any]) -> None:
    """Add what is known of the command's process since the bit was taken. Not durable by itself: it dies with it."""
    _overwrite(directory, PROCESS, _padded(second, _HALF), _BIT + _HALF, durably=False)


def _parsed(half: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(half)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _padded(value: dict[str, Any], size: int) -> bytes:
    data = json.dumps(value).encode()
    if len(data) >= size:
        raise ValueError(f"a record of {len(data)} bytes does not fit into {size}")
    return data.ljust(size - 1) + b"\n"


_sync_content = getattr(os, "fdatasync", os.fsync)
"""Makes bytes durable; when a file was changed is nobody's concern."""


def _overwrite(
    directory: int,
    name: str,
    data: bytes,
    offset: int,
    *,
    durably: bool = True,
    written: Callable[[], None] = lambda: None,
) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        os.pwrite(fd, data, offset)
        written()
        if durably:
            _sync_content(fd)
    finally:
        os.close(fd)


def read_exit(directory: int) -> dict[str, Any] | None:
    """Return how the process ended; None while that is not known. A record that is not whole is none."""
    data = _read(directory, PROCESS, _EXIT)
    return None if data is None else _parsed(data)


def write_exit(directory: int, record: dict[str, Any], written: Callable[[], None] = lambda: None) -> None:
    """Record how the process ended, durably and once. The caller holds the lock. One that is known stays.

    `written` is called when it can be read and does not depend on anybody's life any more, but on the computer's.
    """
    if read_exit(directory) is None:
        _overwrite(directory, PROCESS, _padded(record, _BLOCK), _EXIT, written=written)
    else:
        written()


def try_lock(directory: int) -> int | None:
    """Take the process's lock. Returns what holds it until it is closed, or None when somebody else has it."""
    fd = os.open(PROCESS, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def held(directory: int) -> bool:
    """Tell whether a keeper is with the process: the kernel lets go of its lock however it dies."""
    fd = os.open(PROCESS, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
