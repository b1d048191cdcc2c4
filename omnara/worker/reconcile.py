"""Compares the claims that the database knows with the runs of this process, and mends the difference.

Answers to claims and saves get lost with their connections; this makes sure that neither side keeps an agent that the
other does not know of. Source: coordination §5, rules 3 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from uuid import UUID

import msgspec

from omnara.clock import monotonic
from omnara.domain.claim import HeldClaim

UNKNOWN_CLAIM_AGE_S: Final = 5.0
"""A claim that the database knows and this process does not is released after this. Source: coordination §5 rule 7."""

Key = tuple[UUID, int]
"""Agent and claim token: what names one claim."""

Place = tuple[int, int]
"""Step number and next sequence: how far the holder of a claim has come."""


class Difference(msgspec.Struct, frozen=True):
    """What to do: `release` claims that nobody runs, `stop` runs whose claim is gone, look again when `again`."""

    release: tuple[HeldClaim, ...]
    stop: tuple[Key, ...]
    again: bool


class Reconciler:
    """Remembers since when a claim has been unknown, and which runs were missing at the last look.

    A run is stopped only when two looks in a row miss its claim: the first may have been between its last save and its
    end. A claim is released only when it is old enough: the answer to the claim may still be on its way. A run that is
    ahead of the database is stopped at once: a failover lost commits, and what the run knows may be gone.
    Source: coordination §8.
    """

    def __init__(self, release_after_s: float = UNKNOWN_CLAIM_AGE_S) -> None:
        self._release_after_s = release_after_s
        self._unknown: dict[Key, float] = {}
        self._missing: frozenset[Key] = frozenset()

    def compare(
        self, before: Mapping[Key, Place], held: Mapping[Key, HeldClaim], now_running: Iterable[Key]
    ) -> Difference:
        """Compare the database's claims with the runs before and after they were read."""
        missing = frozenset(key for key in before if key not in held)
        cut = frozenset(key for key, place in before.items() if key in held and _is_behind(held[key], place))
        stop = tuple(missing & self._missing) + tuple(cut)
        self._missing = missing
        live = frozenset(now_running) | frozenset(before)
        now = monotonic()
        self._unknown = {key: self._unknown.get(key, now) for key in held if key not in live}
        due = [key for key, since in self._unknown.items() if now - since >= self._release_after_s]
        for key in due:
            del self._unknown[key]
        return Difference(tuple(held[key] for key in due), stop, again=bool(self._unknown or cut))


def _is_behind(held: HeldClaim, place: Place) -> bool:
    return held.step_number < place[0] or held.next_sequence < place[1]
