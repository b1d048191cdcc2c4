"""The worker: claims agents, runs them as coroutines, and never believes that it owns one without asking.

It follows its identity, compares its claims with the database at intervals, and drains when the process stops: the
running step is saved, then the claim is given back. Source: DESIGN §3; coordination §5, §7, §11.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.clock import Deadline, jittered, monotonic
from omnara.db.bus import Kind, LocalBus
from omnara.db.connection import Connection, ConnectSettings
from omnara.db.dedicated import Dedicated
from omnara.db.failures import CONNECT_ERRORS, DatabaseUnavailable, as_unavailable
from omnara.db.fair_share import in_background
from omnara.db.sched import own_claims
from omnara.domain.claim import Claim, HeldClaim
from omnara.engine.deps import Deps
from omnara.engine.plan import PlanSource
from omnara.engine.recovery import release_claim
from omnara.errors import Unavailable
from omnara.log import get_logger, ids
from omnara.service import Tasks
from omnara.tools.protocol import ToolContext
from omnara.worker.claimer import Claimer
from omnara.worker.context_cache import ContextCache
from omnara.worker.counters import StepCounters
from omnara.worker.identity import Identity
from omnara.worker.loop_watch import watch_loop
from omnara.worker.reconcile import UNKNOWN_CLAIM_AGE_S, Reconciler
from omnara.worker.run import AgentRun
from omnara.worker.runs import Runs
from omnara.worker.saver import Saver, SaverFull

log = get_logger(__name__)

LAST_WORDS_S: Final = 0.5
FAULT_PAUSE_S: Final = 1.0
"""A run that ended by a fault keeps its claim for this long, so that a bug does not spin."""


class Worker:
    """A `Service`, one per process. Shares the claimer's connection with nobody but the hints."""

    name = "worker"
    worker_id: UUID

    def __init__(
        self,
        deps: Deps,
        database: ConnectSettings,
        identity: Identity,
        bus: LocalBus,
        connection: Dedicated,
        plans: PlanSource,
        tools: ToolContext,
    ) -> None:
        self.deps = deps
        self.plans = plans
        self.tools = tools
        settings = deps.settings
        self.saver = Saver(database, max_waiting_bytes=settings.unsaved_results_bytes, sizes=deps.metrics.saves)
        self.cache = ContextCache(settings.context_cache_bytes)
        self.counters = StepCounters(deps.metrics)
        self._identity = identity
        self._bus = bus
        self._connection = connection
        self._runs = Runs(settings.worker_capacity)
        self._claimer = Claimer(
            connection,
            sweep_s=settings.claim_sweep_s,
            yield_s=settings.claim_yield_s,
            room=self._runs.room,
            suspects_ok=self._runs.suspects_ok,
            take=self._take,
        )
        self._tasks = Tasks()
        self._attached = asyncio.Event()
        self._draining = False
        self._release_after_s = min(UNKNOWN_CLAIM_AGE_S, settings.reconcile_s)
        self._reconciler = Reconciler(self._release_after_s)
        self._reconcile_now = asyncio.Event()
        # Hundreds of runs that start together would otherwise pass the pool's limit of waiting and starve requests.
        self.visits = asyncio.Semaphore(max(1, deps.db.size // 2))

    # --- service ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start claiming. The identity must be attached already."""
        self._tasks.spawn(self.saver.run(), "saver")
        self._tasks.spawn(self._claimer.run(), "claimer")
        self._tasks.spawn(self._claimer.watch_waiters(), "waiters")
        self._tasks.spawn(self._reconcile_loop(), "reconcile")
        self._tasks.spawn(watch_loop(self._loop_ran), "loop-watch")
        self._tasks.spawn(self._listen(), "hints")
        self.attached(self._identity.worker_id, is_new=True)

    async def watch(self) -> None:
        """Raise what ended one of the worker's loops."""
        await self._tasks.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Claim nothing more, let steps be saved until `deadline`, then release what still runs."""
        self._draining = True
        self._claimer.pause()
        running = [task for _, task in self._runs]
        if running:
            await asyncio.wait(running, timeout=deadline.remaining_s)
        left = [run for run, task in self._runs if not task.done()]
        await self._runs.cancel()
        if left:
            log.info("steps_released", count=len(left))
            await asyncio.gather(*(self._release(run.claim) for run in left))

    async def stop(self) -> None:
        """End at once. Claims that are still held are released by another process."""
        self._claimer.pause()
        await self._runs.cancel()
        await self._tasks.close()

    # --- what the identity says ---------------------------------------------------------------------------

    def attached(self, worker_id: UUID, *, is_new: bool) -> None:
        """Serve this identity; after a lost session, compare claims first."""
        self.worker_id = worker_id
        self.saver.serve(worker_id)
        self._attached.set()
        if not is_new:
            self._reconcile_now.set()
        if not self._draining:
            self._claimer.resume(worker_id)

    def detached(self) -> None:
        """No new claims and no new effects; what runs goes on, finished results stay in memory."""
        self._attached.clear()
        self._claimer.pause()

    def declared_dead(self, worker_id: UUID) -> None:
        """Everything that runs belongs to somebody else now."""
        log.error("declared_dead", worker_id=str(worker_id), runs=len(self._runs))
        for _, task in self._runs:
            task.cancel()

    def deaths(self, worker_ids: Sequence[UUID]) -> None:
        """Their agents will be ready in a moment; the release hints."""

    # --- what runs ask (RunHost) ----------------------------------------------------------------------------

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """Lend one of the half of the pool's connections that runs may use. Raises DatabaseUnavailable."""
        async with self.visits, self.deps.db.acquire() as connection:
            yield connection

    def must_yield(self, claim: Claim) -> bool:
        """Draining, others waiting for too long, or enough steps for one claim."""
        if self._draining or self._claimer.waiters:
            return True
        return claim.steps_done + 1 >= self.deps.settings.claim_max_steps

    async def may_start_effects(self) -> None:
        """Wait until the identity is attached."""
        await self._attached.wait()

    def cleared(self, claim: Claim) -> None:
        """The next suspect may start at once."""
        claim.deaths = 0
        self._claimer.poke()

    def released(self, claim: Claim, *, ready: bool, ready_s: float | None) -> None:
        """Look again at once, or when the parked retry falls due."""
        if ready:
            self._claimer.poke()
        elif ready_s is not None:
            self._claimer.poke_in(ready_s)

    # --- claims and runs ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Agents that run here now."""
        return len(self._runs)

    def poke(self) -> None:
        """There may be work for this process."""
        self._claimer.poke()

    def _take(self, claim: Claim) -> None:
        self.deps.metrics.claims.inc()
        previous = self._runs.get(claim.agent_id)
        run = AgentRun(self, claim)
        task = self._tasks.spawn(self._run(run, previous[1] if previous else None), f"run:{claim.agent_id}")
        self._runs.add(run, task)
        task.add_done_callback(lambda _: self._ended(run))

    async def _run(self, run: AgentRun, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            # One task per agent. That its claim is gone is certain; it gets a moment to tell what it saved last.
            await asyncio.wait([previous], timeout=LAST_WORDS_S)
            previous.cancel()
            await asyncio.wait([previous])
        with in_background(), ids(agent_id=run.claim.agent_id, worker_id=self.worker_id, step=run.claim.step_number):
            try:
                await run.run()
            except (Unavailable, SaverFull) as error:
                log.warning("run_without_database", error=str(error))
                await self._release(run.claim)
            except Exception:  # a fault of ours ends this run, not the others
                log.exception("run_fault")
                await asyncio.sleep(jittered(FAULT_PAUSE_S))
                await self._release(run.claim)

    def _ended(self, run: AgentRun) -> None:
        if self._runs.discard(run):
            self._claimer.poke()

    async def _release(self, claim: Claim | HeldClaim) -> None:
        """Give a claim back; if that fails, the reconcile or another process does it later. Raises nothing."""
        try:
            await release_claim(self.deps, claim, self.worker_id)
        except Exception as error:  # noqa: BLE001 - Postgres is away, or this agent's data is at fault: not the others'
            log.warning("claim_not_released", agent_id=str(claim.agent_id), error=repr(error))
        self._claimer.poke()

    # --- loops --------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        with self._bus.subscribe({Kind.READY, Kind.CANCEL}) as hints:
            while True:
                batch = await hints.get()
                if Kind.CANCEL in batch.everything:
                    self._reconcile_now.set()
                await self._look_at([UUID(agent_id) for agent_id in batch.ids.get(Kind.CANCEL, ())])
                self._claimer.poke()

    async def _look_at(self, agents: Sequence[UUID]) -> None:
        """Somebody took work of these agents away: those that run here under a claim that is gone stop at once."""
        running = [entry for agent_id in agents if (entry := self._runs.get(agent_id)) is not None]
        if not running:
            return
        try:
            held = {(claim.agent_id, claim.claim_token) for claim in await self._held()}
        except DatabaseUnavailable:
            self._reconcile_now.set()
            return
        for run, task in running:
            if (run.claim.agent_id, run.claim.claim_token) not in held:
                task.cancel()

    async def _held(self) -> list[HeldClaim]:
        try:
            async with self._connection.use() as connection:
                return await own_claims(connection, self.worker_id)
        except CONNECT_ERRORS as error:
            raise as_unavailable(error, "the own claims cannot be read") from error

    async def _reconcile_loop(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(self.deps.settings.reconcile_s)):
                    await self._reconcile_now.wait()
            self._reconcile_now.clear()
            if self._attached.is_set():
                try:
                    await self._reconcile()
                except DatabaseUnavailable as error:
                    log.warning("reconcile_unavailable", error=str(error))

    async def _reconcile(self) -> None:
        before = self._runs.places()
        held = {(claim.agent_id, claim.claim_token): claim for claim in await self._held()}
        difference = self._reconciler.compare(before, held, self._runs.keys())
        for agent_id, token in difference.stop:
            entry = self._runs.get(agent_id)
            if entry is not None and entry[0].claim.claim_token == token:
                entry[1].cancel()
        for claim in difference.release:
            log.warning("unknown_claim_released", agent_id=str(claim.agent_id))
            await self._release(claim)
        if difference.again:
            asyncio.get_running_loop().call_later(self._release_after_s, self._reconcile_now.set)
        probes.hit("reconciled", held=len(held), runs=len(before))

    def _loop_ran(self, lag_s: float) -> None:
        """Tell how late the loop runs, and stop the effects of an identity that stays away."""
        self.deps.metrics.loop_lag_s.observe(lag_s)
        self._claimer.loop_lag_s = lag_s
        away_s = monotonic() - self._identity.last_renewal
        if not self._attached.is_set() and away_s > self.deps.settings.worker_lease_s * 2 / 3:
            for run, task in self._runs:
                if run.effects:  # finished results are kept and offered: the fence judges
                    task.cancel()
