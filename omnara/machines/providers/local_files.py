"""The directory of a local machine: what is in it, and how all of it is made to go away."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import stat
import subprocess
from pathlib import Path

import msgspec

from omnara.machines.posix.sandbox import HOME_INSIDE

__all__ = ["ABOUT", "About", "fill", "kill_all_of", "remove_tree"]

ABOUT = "machine.json"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KILL_S = 5.0


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's directory says about itself; written once."""

    machine_id: str
    installation_id: str
    uid: int | None = None
    network: bool = True


def fill(place: Path, about: About) -> None:
    """Make a machine's directory. `state` is the server's alone; the others are shown to its commands.

    Only the machine's own user may pass through it, whatever that user does to the rights of what is its own.
    """
    place.mkdir(mode=0o700)
    for name, mode in (("state", 0o700), ("etc", 0o755), ("workspace", 0o700), ("tmp", 0o700)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    uid = os.geteuid() if about.uid is None else about.uid
    gid = os.getegid() if about.uid is None else about.uid
    _show(place / "etc" / "passwd", f"agent:x:{uid}:{gid}::{HOME_INSIDE}:/bin/sh\nroot:x:0:0::/:/bin/sh\n")
    _show(place / "etc" / "group", f"agent:x:{gid}:\nroot:x:0:\n")
    if about.uid is not None:
        for name in ("workspace", "tmp"):
            os.chown(place / name, uid, gid)
        os.chown(place, -1, gid)
        place.chmod(0o710)
    (place / ABOUT).write_bytes(msgspec.json.encode(about))
    (place / ABOUT).chmod(0o600)


def _show(path: Path, text: str) -> None:
    """Write a file that the machine's user may read, whatever the server's umask is."""
    path.write_text(text)
    path.chmod(0o644)


def kill_all_of(uid: int) -> None:
    """Kill what a machine's own user runs, until nothing is left: also what left its session. For root.

    The kernel ends all of a user's processes in one step; by their numbers, one that forks all the time gets away.
    """
    for _ in range(20):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["/bin/sh", "-c", "kill -KILL -1"],
                user=uid, group=uid, extra_groups=(), cwd="/", env={}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_KILL_S, check=False,
            )  # fmt: skip
        found = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit() and _owner(entry.path) == uid]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def remove_tree(place: Path) -> None:
    """Remove it all, however deep it is, also directories that were made unreadable by whoever they belonged to.

    What is in a directory is moved up before the directory goes, so no path is ever long, and no name is followed.
    Several may do it at once, and a keeper that is just ending removes files of its own meanwhile.
    """
    try:
        top = os.open(place, _DIRECTORY)
    except FileNotFoundError:
        return
    try:
        while entries := os.listdir(top):
            for name in entries:
                _remove_entry(top, name)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(place)


def _remove_entry(top: int, name: str) -> None:
    """Remove an entry of the top directory; what a directory holds becomes entries of the top."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=top)
            return
        directory = _open_directory(name, top)
        try:
            for inner in os.listdir(directory):
                with contextlib.suppress(FileNotFoundError):
                    _empty_into(top, directory, inner)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=top)


def _empty_into(top: int, directory: int, name: str) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=directory)
        return
    os.close(_open_directory(name, directory))
    os.rename(name, f".{secrets.token_hex(12)}", src_dir_fd=directory, dst_dir_fd=top)


def _open_directory(name: str, parent: int) -> int:
    """Open a directory, and give its owner the rights to empty and move it. Root has them, and changes nothing."""
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
