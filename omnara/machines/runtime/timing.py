"""The runtime's constants, together, so that tests shrink what production leaves alone."""

from __future__ import annotations

import msgspec

__all__ = ["Timing"]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds (`_s`). Source: machines.md §3 (data deadline), §6 (resend)."""

    silence_s: float = 70.0
    """A line without a data frame for this long is given up; pings do not count."""
    resend_s: float = 1.0
    """When a report is sent again that the server could not store."""
    settle_s: float = 0.25
    """How long the first output of a command may be followed by its end, for one whole answer instead of two halves."""
    watch_s: float = 60.0
    """One look at a running process; a home that misses its end is asked again."""
    quiesce_s: float = 20.0
    """How long an action under way may take until claims are made without its outcome (a write has 10 s)."""
    keep_settled: int = 1_000
    """Processes that are over and told whose output stays; of older ones a read says `output_unavailable`."""
    restart_wait_s: float = 2.0
    """The wait for output of a command whose offer, and so its own wait, was lost with an earlier runtime."""
