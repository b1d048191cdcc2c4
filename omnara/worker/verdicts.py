"""What a look at the other workers is worth: whose death it shows, and when it shows nothing.

A lock that can be taken and a lease that ran out are evidence only while the database was there for everybody. After a
start, a promotion or a standstill of it, workers that live have not had the time to show it.
Source: DESIGN §3 "Who is alive"; coordination §1.2, §5 (rules 1 to 4); field-reports B08.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from omnara.clock import monotonic
from omnara.db import workers as db
from omnara.db.connection import Connection
from omnara.db.workers import Probe

GAP_SHARE: Final = 0.1
"""The time between two looks counts for at most this part of a lease, however long it was.

Whoever lives renews at least every 0.4 of a lease (a third, give or take a fifth) while the database answers, so a
standstill never makes a whole lease of watched time; and slow answers postpone a verdict tenfold, not for ever.
"""


class IdentityTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in seconds, from the settings."""

    lease_s: float
    renew_s: float
    probe_s: float
    grace_s: float


class _Watched:
    """A lease as it was seen last, and for how long it has been seen like that."""

    __slots__ = ("expires_at", "length_s", "unchanged_s")

    def __init__(self, probe: Probe, length_s: float) -> None:
        self.expires_at = probe.lease_expires_at
        self.unchanged_s = 0.0
        self.length_s = max(length_s, probe.left_s)


class Verdicts:
    """Judges the others for one worker. For the thread of its identity, with one look at a time.

    Every time is of this process's clock; only the database says that a lease has run out.
    """

    def __init__(self, times: IdentityTimes) -> None:
        self._times = times
        self._attached = self._looked = monotonic()
        self._watched: dict[UUID, _Watched] = {}
        self.regained = float("-inf")
        """When this process's session was last taken up again after a loss."""

    def attached(self, *, again: bool) -> None:
        """A session begins; `again`: this process has lost one before."""
        self._attached = self._looked = monotonic()
        if again:
            self.regained = self._attached

    async def look(self, connection: Connection, own_id: UUID) -> tuple[bool, list[UUID]]:
        """Probe all live workers once: whether the own row is live, and whom this look has declared dead.

        A few statements, each a transaction of its own. Raises what the connection raises.
        """
        probes = await db.probe_workers(connection, own_id)
        others = [probe for probe in probes if probe.worker_id != own_id]
        self._watch(others)
        if len(others) == len(probes):
            return False, []
        lapsed = [probe for probe in others if self._has_lapsed(probe)]
        gone = [probe for probe in others if probe.gone]
        if not (gone or lapsed) or monotonic() - self.regained < self._times.grace_s:
            return True, []
        start = await db.server_start(connection)
        if self._is_fresh(start.age_s) or self._is_fresh(await db.promotion_age(connection)):
            return True, []
        missed = [probe.worker_id for probe in gone if self._is_missed(probe, start.at)]
        leases = [(probe.worker_id, probe.lease_expires_at) for probe in lapsed]
        return True, await db.declare_dead(connection, missed, leases)

    def _watch(self, others: Sequence[Probe]) -> None:
        now = monotonic()
        passed_s = min(now - self._looked, self._times.lease_s * GAP_SHARE)
        self._looked = now
        before, self._watched = self._watched, {}
        for probe in others:
            known = before.get(probe.worker_id)
            if known is not None and known.expires_at == probe.lease_expires_at:
                known.unchanged_s += passed_s
                self._watched[probe.worker_id] = known
            else:
                length_s = self._times.lease_s if known is None else known.length_s
                self._watched[probe.worker_id] = _Watched(probe, length_s)

    def _has_lapsed(self, probe: Probe) -> bool:
        """It ran out, and was watched for its whole length without a renewal."""
        watched = self._watched[probe.worker_id]
        return probe.left_s < 0 and watched.unchanged_s >= watched.length_s

    def _is_fresh(self, age_s: float) -> bool:
        """Of a start or a promotion; a negative age is of a clock that was set back since."""
        return 0 <= age_s < self._times.grace_s

    def _is_missed(self, probe: Probe, start: datetime) -> bool:
        """Not attached since Postgres started it may be on its way back, however long that start took."""
        return probe.attached_at >= start or monotonic() - self._attached >= self._times.grace_s
