"""What was sent over a channel a short while ago, so that it is not sent again with every look.

Only a matter of economy: repeated offers and terminations are harmless. Everything is forgotten after a time, so a
frame that was lost on its way costs that time and no more. Source: machines.md §3 (Drain), §14 row 10.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

__all__ = ["Outstanding"]

OFFER_AGAIN_S: Final = 30.0
"""Source: machines.md §3 (the reference looks again every 30 s)."""
MOST_OFFERS: Final = 24
"""Offers without an answer; a channel's queue holds 64 frames, and offers must not fill it."""

REFUSED_S: Final = 1.0


class Outstanding:
    """Per channel: offers by id with the time of their sending, and terminations. Times are of the monotonic clock."""

    def __init__(self, *, again_s: float, offer_again_s: float = OFFER_AGAIN_S) -> None:
        self.terminations: dict[UUID, float] = {}
        self.crowded = False
        """Whether the last look was put off because it was `full`, so that an answer makes room for another one."""
        self._open: dict[UUID, float] = {}
        self._held: dict[UUID, float] = {}
        self._again_s = again_s
        self._offer_again_s = offer_again_s

    def full(self, now: float) -> bool:
        """Whether nothing should be offered until something is answered, or too old to wait for."""
        _forget(self._open, now - self._offer_again_s)
        self.crowded = len(self._open) >= MOST_OFFERS
        return self.crowded

    def skip(self, now: float) -> set[UUID]:
        """Return what need not be offered at `now`: it was, or it was answered, a short while ago."""
        for sent in (self._open, self._held):
            _forget(sent, now - self._offer_again_s)
        _forget(self.terminations, now - 10 * self._again_s)
        return {*self._open, *self._held}

    def offered(self, found: UUID, now: float) -> None:
        """Note an offer."""
        self._open[found] = now

    def accepted(self, found: UUID, now: float) -> None:
        """Note that an offer was taken up: a look from just before must not offer it again."""
        self._open.pop(found, None)
        self._held[found] = now

    def refused(self, found: UUID, now: float) -> None:
        """Note that a grant was refused. It may be possible soon (an action whose turn comes), but not at once."""
        self._open.pop(found, None)
        self._held[found] = now - self._offer_again_s + min(REFUSED_S, self._offer_again_s)

    def may_terminate(self, process_id: UUID, now: float) -> bool:
        """Whether to ask for the end of a process (again), and note that."""
        if now - self.terminations.get(process_id, float("-inf")) < self._again_s:
            return False
        self.terminations[process_id] = now
        return True


def _forget(sent: dict[UUID, float], before: float) -> None:
    for old in [found for found, at in sent.items() if at <= before]:
        del sent[old]
