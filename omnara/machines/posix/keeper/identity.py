"""Who a process is, beyond its number: numbers come back, a number with its boot and its start time does not.

Source: machines.md §13 (process groups by boot id and start time, never bare numbers).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NamedTuple

__all__ = ["Member", "boot_id", "kill_left_over", "members", "runs", "signal_session", "start_time"]


class Member(NamedTuple):
    """One living process of a session."""

    pid: int
    group: int


def boot_id() -> str:
    """Name this run of the kernel; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode().split()


def start_time(pid: int) -> str | None:
    """Return when a process began, in clock ticks since boot; None when there is none of that number."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def runs(pid: int, start: object) -> bool:
    """Tell whether the process that began then is still running, and no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[19] == start and fields[0] not in "ZX"


def members(session: int) -> list[Member]:
    """Return the living processes of a session, in whatever groups they put themselves; no zombies.

    Where there is no /proc, only the group of the session's leader is looked at.
    """
    try:
        names = os.listdir("/proc")
    except OSError:
        return _group_only(session)
    found = []
    for name in names:
        if not name.isdigit():
            continue
        fields = _stat(int(name))
        if fields is not None and fields[3] == str(session) and fields[0] not in "ZX":
            found.append(Member(int(name), int(fields[2])))
    return found


def _group_only(group: int) -> list[Member]:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return [Member(group, group)]
    return []


def signal_session(session: int, number: int, living: list[Member]) -> None:
    """Signal the leader's group at once, and every other living member of its session by itself.

    Where nobody is seen to live, as with a /proc that is not mounted, the group is tried all the same.
    """
    if not living or any(member.group == session for member in living):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, number)
    for member in living:
        if member.group != session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, number)


def kill_left_over(leader: dict[str, object]) -> bool:
    """Kill what a dead keeper left behind; says whether there was anything. `leader` as the keeper wrote it down.

    Another boot, a leader's number that now belongs to somebody else, or no way to tell: nothing is touched.
    """
    pid = leader.get("pid")
    if not isinstance(pid, int) or leader.get("start") is None or leader.get("boot") != boot_id():
        return False
    now = start_time(pid)
    if now is not None and now != leader.get("start"):
        return False
    living = members(pid)
    if living:
        signal_session(pid, signal.SIGKILL, living)
    return bool(living)
