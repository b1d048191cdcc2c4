"""What a figure was measured on: the commit and the machine, without names, addresses or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["ROOT", "Commit", "Machine", "commit", "machine"]

ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout: children start here, so that they import the code beside this file."""


class Commit(msgspec.Struct, frozen=True):
    """`dirty`: something outside of the results differed from the commit when the run began."""

    id: str
    dirty: bool


class Machine(msgspec.Struct, frozen=True):
    """Cores that this process may use, memory in GiB, and what runs the code.

    `scheduling`: `normal`, or `real-time` for a run that was put before everything else on a busy machine.
    """

    cores: int
    memory_gib: float
    cpu: str
    python: str
    load_before: float
    scheduling: str = "normal"


def commit() -> Commit:
    """Return the checkout's commit, or `unknown` outside of one."""
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return Commit(head or "unknown", bool(changed))


def machine() -> Machine:
    """Return what can be known of this machine; `load_before` tells whether it was quiet."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(pages / 2**30, 1),
        cpu=_cpu_model(),
        python=platform.python_version(),
        load_before=round(os.getloadavg()[0], 2),
        scheduling=_scheduling(),
    )


def _scheduling() -> str:
    if not hasattr(os, "sched_getscheduler"):
        return "normal"
    return "real-time" if os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO) else "normal"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
