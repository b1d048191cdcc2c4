"""What a look at the other workers is worth: whose death it shows, and when it shows nothing.

A lock that can be taken and a lease that ran out are evidence only while the database has been there for everybody.
After a start, a promotion or a silence of it, workers that live have not had the time to show it.
Source: DESIGN §3 "Who is alive"; coordination §1.2, §5 (rules 1 to 4); field-reports B08.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.clock import monotonic
from omnara.db import workers as db
from omnara.db.connection import Connection
from omnara.db.workers import Probe

SILENT_LEASE_SHARE: Final = 0.1
"""Part of the lease for which the database may say nothing before it counts as a silence.

A lease is renewed every third of it or sooner, give or take a fifth: so one runs out for want of answers only in a
silence of three fifths of a lease, of which the judge's own renewal, if it is the last to be held up, sees one fifth.
"""


class IdentityTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in seconds, from the settings."""

    lease_s: float
    renew_s: float
    probe_s: float
    grace_s: float


class Verdicts:
    """Judges the others for one worker. For the thread of its identity; every time is of this process's clock."""

    def __init__(self, times: IdentityTimes) -> None:
        self._times = times
        self._attached = self._answered = monotonic()
        self._leases_from = self._attached + times.lease_s
        self.regained = float("-inf")
        """When this worker's own session was last taken up again after a loss."""

    def attached(self, *, again: bool) -> None:
        """The session begins, for the first time or `again`: nobody's lease is judged before one whole lease."""
        self._attached = self._answered = monotonic()
        self._leases_from = self._attached + self._times.lease_s
        if again:
            self.regained = self._attached

    def heard(self) -> None:
        """The database has answered. If it was silent before, the others had no answers either."""
        now = monotonic()
        if now - self._answered > self._times.lease_s * SILENT_LEASE_SHARE + 2 * self._times.probe_s:
            self._leases_from = now + self._times.lease_s
        self._answered = now

    async def look(self, connection: Connection, own_id: UUID) -> tuple[bool, list[UUID]]:
        """Probe all live workers once: whether the own row is live, and whom this look has declared dead.

        Two statements, each a transaction of its own. Raises what the connection raises.
        """
        probes = await db.probe_workers(connection, own_id, self._times.lease_s)
        self.heard()
        own = [probe for probe in probes if probe.worker_id == own_id]
        if not own:
            return False, []
        if own[0].expired:  # as far as the database's clock goes, this worker has been away itself
            self._leases_from = monotonic() + self._times.lease_s
        expired = [probe.worker_id for probe in probes if probe.expired and monotonic() >= self._leases_from]
        gone = [probe.worker_id for probe in probes if probe.gone and self._is_missed(probe)]
        if not (gone or expired) or await self._is_too_early(connection):
            return True, []
        return True, await db.declare_dead(connection, gone, expired)

    def _is_missed(self, probe: Probe) -> bool:
        """Without a sign of life since Postgres started it may be on its way back, however long that start took."""
        return probe.seen or monotonic() - self._attached >= self._times.grace_s

    async def _is_too_early(self, connection: Connection) -> bool:
        grace_s = self._times.grace_s
        if monotonic() - self.regained < grace_s:
            return True
        return await db.postmaster_age(connection) < grace_s or await db.promotion_age(connection) < grace_s
