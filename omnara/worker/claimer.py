"""Takes ready agents for this process: one claim in flight at a time, on a connection of its own.

It looks when it is poked (a hint, a released claim, a freed slot), when a retry parked here falls due, and at every
sweep: a lost hint costs one sweep and nothing else.
Source: DESIGN §3 "Three verbs" and "Hints"; coordination §3.2 (bounded scan), §6, §7 (oldest waiter), §11.8 (loop lag).
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from omnara import probes
from omnara.clock import jittered, monotonic
from omnara.db.connection import Connection
from omnara.db.dedicated import Dedicated
from omnara.db.failures import DatabaseUnavailable
from omnara.db.sched import ALWAYS, NO_PROJECT, claim_agents, claim_in_turn, oldest_waiter
from omnara.domain.claim import Claim
from omnara.log import get_logger

log = get_logger(__name__)

CLAIM_BATCH = 64
"""Agents taken by one statement; more follow at once while there is room."""
LOOP_LAG_LIMIT_S = 1.0
"""Stop claiming while the event loop runs this late. Source: coordination §11.8."""
FULL_SCAN_S = 1.0
"""Time between two claims whose scan has no lower bound. Source: coordination §3.2."""
SCAN_BACK = timedelta(seconds=1)
"""How far before the last claimed ready_at the bounded scan starts. Source: coordination §3.2."""


class Claimer:
    """`room` says how many more agents may run here, `suspects_ok` whether a suspect may be one of them.

    `take` receives every claim, in the event loop. `waiters` becomes True while some agent has been ready for longer
    than the yield limit: then kept claims are given back, and claims go round the projects, so that one with thousands
    of ready agents does not make the others wait for all of them. Once a second those that have been ready longest
    have their turn, whatever their project: among them are the suspects.
    """

    def __init__(
        self,
        connection: Dedicated,
        *,
        sweep_s: float,
        yield_s: float,
        room: Callable[[], int],
        suspects_ok: Callable[[], bool],
        take: Callable[[Claim], None],
    ) -> None:
        self._connection = connection
        self._sweep_s = sweep_s
        self._yield_s = yield_s
        self._room = room
        self._suspects_ok = suspects_ok
        self._take = take
        self._poked = asyncio.Event()
        self._since: datetime = ALWAYS
        self._turn = NO_PROJECT
        self._full_scan_at = 0.0
        self.worker_id: UUID | None = None
        self.paused = True
        self.loop_lag_s = 0.0
        self.waiters = False

    def poke(self) -> None:
        """There may be work: look soon. Cheap, merged."""
        self._poked.set()

    def poke_in(self, seconds: float) -> None:
        """Look when a retry that was parked by this process falls due."""
        asyncio.get_running_loop().call_later(seconds, self.poke)

    def resume(self, worker_id: UUID) -> None:
        """Claim for this identity from now on."""
        self.worker_id = worker_id
        self.paused = False
        self.poke()

    def pause(self) -> None:
        """Claim nothing until `resume`: detached, draining."""
        self.paused = True

    async def run(self) -> None:
        """Claim until cancelled."""
        while True:
            try:
                async with asyncio.timeout(jittered(self._sweep_s)):
                    await self._poked.wait()
            except TimeoutError:
                pass
            self._poked.clear()
            if not self.paused and self.loop_lag_s < LOOP_LAG_LIMIT_S:
                await self._look()

    async def _look(self) -> None:
        try:
            while not self.paused and (room := self._room()) > 0:
                if not await self._claim(min(room, CLAIM_BATCH)):
                    return
        except DatabaseUnavailable as error:
            log.warning("claim_unavailable", error=str(error))
            await asyncio.sleep(random.uniform(0.1, 0.5))
        except Exception as error:  # noqa: BLE001 - what was claimed without an answer is found by the reconcile
            log.warning("claim_failed", error=type(error).__name__, detail=str(error))
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def _claim(self, limit: int) -> bool:
        """Claim once; whether there may be more to claim."""
        async with self._connection.use() as connection:
            if self.paused or self.worker_id is None:
                return False  # detached while this waited for its connection
            if self.waiters and monotonic() < self._full_scan_at:
                claims = await self._claim_in_turn(connection, self.worker_id, limit)
                more = bool(claims)
            else:
                claims = await self._claim_longest(connection, self.worker_id, limit)
                more = len(claims) == limit
        if claims:
            probes.hit("claimed", agents=len(claims))
        for claim in claims:
            self._take(claim)
        return more

    async def _claim_longest(self, connection: Connection, worker_id: UUID, limit: int) -> list[Claim]:
        now = monotonic()
        full = now >= self._full_scan_at
        claims = await claim_agents(
            connection,
            worker_id,
            limit=limit,
            since=ALWAYS if full else self._since,
            token=secrets.randbits(63) or 1,
            suspects=self._suspects_ok(),
        )
        if full:
            self._full_scan_at = now + FULL_SCAN_S
        if claims:
            self._since = max(claim.ready_at for claim in claims) - SCAN_BACK
        return claims

    async def _claim_in_turn(self, connection: Connection, worker_id: UUID, limit: int) -> list[Claim]:
        for after in (self._turn, NO_PROJECT):
            token = secrets.randbits(63) or 1
            claims = await claim_in_turn(connection, worker_id, limit=limit, after=after, token=token)
            if claims:
                self._turn = max(claim.project_id for claim in claims)
                return claims
        return []

    async def watch_waiters(self) -> None:
        """Once a second, learn whether somebody has waited for longer than the yield limit; until cancelled."""
        while True:
            await asyncio.sleep(jittered(min(1.0, self._yield_s * 4)))
            if self.paused:
                continue
            try:
                async with self._connection.use() as connection:
                    age = await oldest_waiter(connection, at_least_s=self._yield_s, since=ALWAYS)
                self.waiters = age is not None
            except Exception as error:  # noqa: BLE001 - only a question of fairness; asked again in a second
                log.debug("waiters_unknown", error=type(error).__name__)
