"""The directory of a local machine: what is in it, and how all of it is made to go away."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec

from omnara.machines.posix.sandbox import HOME_INSIDE

__all__ = ["ABOUT", "About", "fill", "kill_all_of", "remove_tree"]

ABOUT = "machine.json"
_TRIES = 5
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
    (place / "etc" / "passwd").write_text(f"agent:x:{uid}:{gid}::{HOME_INSIDE}:/bin/sh\nroot:x:0:0::/:/bin/sh\n")
    (place / "etc" / "group").write_text(f"agent:x:{gid}:\nroot:x:0:\n")
    if about.uid is not None:
        for name in ("workspace", "tmp"):
            os.chown(place / name, uid, gid)
        os.chown(place, -1, gid)
        place.chmod(0o710)
    (place / ABOUT).write_bytes(msgspec.json.encode(about))
    (place / ABOUT).chmod(0o600)


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
    """Remove it all, also directories that were made unreadable by whoever they belonged to.

    Root needs no rights for that, and changes none: not even of what a name leads to meanwhile.
    """
    for directory, _, _ in os.walk(place) if os.geteuid() != 0 else ():
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(entry.path, 0o700)
    for _ in range(_TRIES):
        # A keeper that is just ending removes files of its own meanwhile.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(place)
        if not place.exists():
            return
    shutil.rmtree(place)
