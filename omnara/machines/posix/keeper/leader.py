"""The life and the end of a command's process group.

A command is over when its shell is: what else is left in its session gets SIGTERM, and SIGKILL after a grace. Only
children in a session of their own outlive it. Source: machines.md §7.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NamedTuple

from . import identity

__all__ = ["Ended", "Leader", "signal_name"]

_AGAIN_S = 0.05
_HOLDERS = 1
"""A sandbox's first process has one child of its own, which keeps the sandbox there."""


class Ended(NamedTuple):
    """How the shell ended: one of both is set."""

    code: int | None
    signal: int | None


def signal_name(number: int) -> str:
    """Say a signal in words, such as `killed`. Source: machines.md §7 (a name such as `killed`)."""
    words = signal.strsignal(number) or f"signal {number}"
    return words if words[1:2].isupper() or words[1:2] == "/" else words[0].lower() + words[1:]


class Leader:
    """The shell and its session. Its zombie is kept until the session is empty, so that its number stays its own."""

    def __init__(self, pid: int, *, sandbox: int | None, grace_s: float) -> None:
        """Take charge of a child that leads a session. `sandbox`: the first process there, which gets its orphans."""
        self.pid = pid
        self.ended: Ended | None = None
        self.over = False
        self._sandbox = sandbox
        self._grace_s = grace_s
        self._kill_at: float | None = None
        self._look_at: float | None = None

    def interrupt(self) -> None:
        """Send SIGINT to the group."""
        self._signal_group(signal.SIGINT)

    def terminate(self, now: float) -> None:
        """Send SIGTERM to the session; SIGKILL follows after the grace, unless it is over by then."""
        if self._kill_at is None and not self.over:
            self._kill_at = now + self._grace_s
            identity.signal_session(self.pid, signal.SIGTERM, identity.members(self.pid))

    def _signal_group(self, number: int) -> None:
        if not self.over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def look(self, now: float) -> None:
        """See what has ended, and go on with ending the rest. Cheap while nothing ends."""
        if self.over:
            return
        if self.ended is None:
            self.ended = self._status()
        children = self._reap_orphans()
        if self.ended is not None:
            self._clear(now, children)
        if not self.over and self._kill_at is not None and now >= self._kill_at:
            identity.signal_session(self.pid, signal.SIGKILL, identity.members(self.pid))
            self._look_at = now + _AGAIN_S

    def _clear(self, now: float, children: list[int] | None) -> None:
        """See to what the shell left behind. What cannot be killed (somebody else's, stuck in the kernel) is let go."""
        given_up = self._kill_at is not None and now >= self._kill_at + self._grace_s
        if given_up or self._alone(children) or not identity.members(self.pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.over = True
            return
        self._look_at = now + _AGAIN_S
        self.terminate(now)

    def _alone(self, children: list[int] | None) -> bool:
        """Tell at little cost, without looking at all processes, that the shell left nothing behind."""
        if self._sandbox is None:
            return children == [self.pid]
        orphans = _children_of(f"{self._sandbox}/task/{self._sandbox}")
        return orphans is not None and len(orphans) <= _HOLDERS

    def _status(self) -> Ended | None:
        if not hasattr(os, "waitid"):
            return self._reaped_status()
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        exited = found.si_code == os.CLD_EXITED
        return Ended(found.si_status if exited else None, None if exited else found.si_status)

    def _reaped_status(self) -> Ended | None:
        """Where a zombie cannot be looked at, it has to go before the rest does."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, None) if code >= 0 else Ended(None, -code)

    def _reap_orphans(self) -> list[int] | None:
        """Reap the dead among what we were left with; return which children are left (None: cannot be told)."""
        children = _children_of("thread-self")
        if children is None:
            return None
        return [pid for pid in children if pid == self.pid or not _reaped(pid)]

    def next_look(self) -> float | None:
        """Return when to look again even if nothing is heard, on the monotonic clock."""
        if self.over or self._kill_at is None:
            return None
        return self._kill_at if self._look_at is None else self._look_at


def _children_of(task: str) -> list[int] | None:
    """List a task's children; None where the kernel does not tell."""
    try:
        with open(f"/proc/{task}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return None


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
