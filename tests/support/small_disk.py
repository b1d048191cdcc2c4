"""A file system that is small enough to be filled, for a real database to run out of room on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CHUNK = 64 * 1024


class SmallDisk:
    """A mounted tmpfs. `fill` takes all that is left; `free` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def left(self) -> int:
        """Bytes that can still be written."""
        return shutil.disk_usage(self.path).free

    def fill(self) -> None:
        """Write until nothing more fits. May be repeated: others may have given something back."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * CHUNK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Give all of it back."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mount one at `path`, and unmount it at the end: whoever still uses it must be gone by then.

    Skips the test where mounting is not allowed (an unprivileged user, most containers).
    """
    path.mkdir(parents=True)
    helper = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={megabytes}m,mode=0755,uid={os.geteuid()},gid={os.getegid()}"
    command = [*helper, "mount", "-t", "tmpfs", "-o", options, "omnara-tests", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run([*helper, "umount", str(path)], check=True)
