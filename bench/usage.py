"""What a process uses, as Linux counts it: memory that is resident, and processor time."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_s", "fine_cpu_s", "rss_bytes"]


def rss_bytes(pid: int | str) -> int:
    """Return the resident memory of a process, in bytes. Raises FileNotFoundError when it is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int | str) -> float:
    """Return the seconds of processor time that a process has used. Raises FileNotFoundError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fine_cpu_s(pid: int | str) -> float:
    """Return the same to the nanosecond, of the threads that there are now. Raises FileNotFoundError when it is gone.

    For processes that do next to nothing: the other one counts hundredths.
    """
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9
