"""A directory for a database of a test's own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def own_directory() -> Iterator[Path]:
    """A directory outside pytest's own, which other accounts may enter; no server of it is left running."""
    path = Path(tempfile.mkdtemp(prefix="omnara-own-"))
    path.chmod(0o711)
    yield path / "data"
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(path):
            process.kill()
            process.wait(30)
    shutil.rmtree(path)
