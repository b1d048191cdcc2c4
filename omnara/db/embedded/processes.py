"""Which processes belong to a database directory: those that work in it, as every process of Postgres does.

The number in a pid file may have gone to any other process; where a process works is what its number cannot fake.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["processes_in", "works_in"]


def works_in(pid: int, pgdata: Path) -> bool:
    """Whether process `pid` lives and its working directory is `pgdata`, as that of every Postgres process is."""
    psutil = _psutil()
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == pgdata.resolve()
    except (psutil.Error, OSError):
        return False


def processes_in(pgdata: Path) -> Iterator[int]:
    """Yield the ids of all live processes that work in `pgdata`. Blocking: looks at every process."""
    for pid in _psutil().pids():
        if works_in(pid, pgdata):
            yield pid


def _psutil() -> Any:
    """psutil comes with the embedded extra only, and has no type information."""
    return importlib.import_module("psutil")
