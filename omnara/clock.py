"""Time as this process may use it: monotonic durations only.

What is written down, compared between processes or decides about a lease is the database's clock; a wall clock of a
process never decides anything. Source: DESIGN §2, invariant 10.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["Backoff", "Deadline", "jittered", "monotonic", "poll_until"]

monotonic: Final = time.monotonic
"""Seconds on a clock that is never set back; only differences mean something."""


def jittered(interval_s: float, ratio: float = 0.2) -> float:
    """Return `interval_s` ± `ratio`, so that replicas started together do not act together."""
    return interval_s * random.uniform(1 - ratio, 1 + ratio)


class Deadline:
    """A point in time that several waits share. `remaining_s` never goes below zero."""

    def __init__(self, after_s: float) -> None:
        self._at = monotonic() + after_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._at - monotonic())

    @property
    def passed(self) -> bool:
        """True once nothing is left."""
        return monotonic() >= self._at


class Backoff:
    """Growing waits with full jitter in the upper half: `base_s`, doubled each time, at most `cap_s`."""

    def __init__(self, base_s: float, cap_s: float) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def reset(self) -> None:
        """Start again from `base_s`; call it after a success."""
        self._failures = 0

    def next_s(self) -> float:
        """Count a failure and return how many seconds to wait: between half of the step and all of it."""
        # The exponent is bounded so that a week of failures does not compute 2 ** 600000.
        step_s = min(self._cap_s, self._base_s * 2 ** min(self._failures, 32))
        self._failures += 1
        return random.uniform(step_s / 2, step_s)

    async def wait(self) -> None:
        """Count a failure and sleep. Cancellation ends the sleep at once."""
        await asyncio.sleep(self.next_s())


async def poll_until(check: Callable[[], Awaitable[bool]], *, within_s: float, every_s: float = 0.05) -> bool:
    """Ask `check` until it says yes; return False when `within_s` seconds pass first. Errors pass through."""
    deadline = Deadline(within_s)
    while True:
        if await check():
            return True
        if deadline.passed:
            return False
        await asyncio.sleep(min(every_s, deadline.remaining_s))
