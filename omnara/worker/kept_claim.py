"""A claim that is kept: what a run knows of its agent, and the one way in which it saves and goes on.

Apart from the steps themselves, since every kind of step saves, is told about and begins the next one in the same way.
Source: DESIGN §3 "Three verbs".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from omnara.clock import monotonic
from omnara.db.failures import DatabaseUnavailable
from omnara.domain.advance import Advance, Advanced
from omnara.domain.claim import Claim
from omnara.domain.step import WaitingInput
from omnara.engine.machines.tools import TRANSACTIONAL_TOOLS
from omnara.engine.model_step import Begun, Next, advance_for, begin_model
from omnara.engine.plan import StepPlan
from omnara.engine.tool_step import RunningCall, ToolsBegun
from omnara.engine.tool_tx import settle
from omnara.log import get_logger, note
from omnara.worker.host import RunHost
from omnara.worker.memory import Memory
from omnara.worker.tell import tell_saved

log = get_logger(__name__)


class KeptClaim:
    """One claim with its plan, its waiting inputs and its memory of the conversation."""

    def __init__(self, host: RunHost, claim: Claim) -> None:
        self.claim = claim
        self._host = host
        self._deps = host.deps
        self._queue: deque[WaitingInput] = deque()
        self._steering: tuple[WaitingInput, ...] = ()
        self._more_queued = False
        self._open_calls = claim.open_calls
        self._unsettled = False
        """Whether transactional calls of this step stay ready, so that the claim is to be given back after it."""
        self._plan: StepPlan | None = None
        self._memory = Memory(host, claim)
        self._started = 0.0
        self._per_model = self._deps.settings.model_retries + 1
        self._spent = claim.attempt // self._per_model * self._per_model
        """Attempts of the models before the one that serves this turn: the next call counts from there."""

    async def _get_plan(self) -> StepPlan:
        if self._plan is None or self._plan.config_id != self.claim.config_id:
            self._plan = await self._host.plans.get(self.claim.config_id)
        return self._plan

    async def _upcoming(self, plan: StepPlan) -> StepPlan:
        """The plan of the step that follows: revisions, grants and keys apply to the next call of a kept claim too.

        Without the database the step that is over must still be saved, so it goes on with what it has.
        """
        try:
            self._plan = await self._host.plans.get(self.claim.config_id)
        except DatabaseUnavailable:
            return plan
        return self._plan

    def _at(self, plan: StepPlan, attempt: int) -> StepPlan:
        return plan.at(attempt, self._per_model)

    def _model_next(self, plan: StepPlan, admit: tuple[WaitingInput, ...], attempt: int | None = None) -> Next:
        """A model call; without an attempt the first one of the model that serves this turn, or of the first model in
        the turn that `admit` opens.
        """
        if attempt is None:
            attempt = 1 if admit else self._spent + 1
        return Next("model", begin_model(self.claim, self._at(plan, attempt), admit, attempt))

    def _after_turn(self, plan: StepPlan) -> Next:
        """The turn is over: the next queued input that is known of opens the next one."""
        if self._queue:
            return self._model_next(plan, (self._queue[0],))
        return Next("idle", ready_s=0.0 if self._more_queued else None)

    # --- saving -------------------------------------------------------------------------------------------

    def _yielding(self, following: Next) -> Next:
        """Give the claim back instead of beginning, when others wait or the worker drains."""
        if following.begin is None or not self._host.must_yield(self.claim):
            return following
        return Next(following.action, ready_s=0.0)

    async def _advance(self, following: Next) -> Begun | ToolsBegun | None:
        return await self._save(advance_for(self.claim, following))

    async def _save(
        self,
        item: Advance,
        calls: tuple[RunningCall, ...] = (),
        *,
        kind: str | None = None,
        outcome: str = "saved",
        held: ToolsBegun | None = None,
    ) -> Begun | ToolsBegun | None:
        """Save, tell everybody, return the step that has begun (or goes on); None when the claim is no longer ours."""
        done = await self._host.saver.save(item)
        if not isinstance(done, Advanced):
            log.info("claim_lost")
            if kind is not None:
                self._host.counters.step(kind, "lost")
            return None
        self._count(item, kind, outcome)
        self.claim.follow(done)
        events = tell_saved(self._deps, item, done)
        self._memory.fold(events)
        if item.mode == "hold":
            return held if done.kept else None
        if not done.begun:
            self._host.released(self.claim, ready=done.ready and not item.ready_s, ready_s=item.ready_s)
            return None
        return self._opened(item, done, calls)

    async def _settle_all(self, calls: Sequence[RunningCall], *, others_run: bool) -> bool:
        """Settle transactional calls one after another; False when the claim is no longer ours.

        When the database cannot do it, they stay ready, and somebody settles them later. With `others_run`, other calls
        of the step are marked as running, and only this run may run them: it goes on instead of ending by that failure,
        after which they would count as interrupted although nothing has happened to them. Without, raises it.
        """
        for call in calls:
            try:
                if not await self._settle(call):
                    return False
            except DatabaseUnavailable as error:
                if not others_run:
                    raise
                log.warning("transactional_calls_postponed", tool=call.name, error=repr(error))
                self._unsettled = True
                break
        return True

    async def _settle(self, call: RunningCall) -> bool:
        """Run a transactional call, and take over what it did to the log; False when the claim is no longer ours."""
        async with self._host.visits:
            settled = await settle(self._deps, TRANSACTIONAL_TOOLS, self.claim, self._host.worker_id, call)
        if settled is None:
            log.info("claim_lost")
            self._host.counters.step("tools", "lost")
            return False
        self._open_calls = settled.open_calls
        self.claim.next_sequence = settled.next_sequence
        self.claim.batch_sequence = settled.batch_sequence
        self._memory.fold(settled.events)
        return True

    def _count(self, item: Advance, kind: str | None, outcome: str) -> None:
        now = monotonic()
        if kind is not None:
            self._host.counters.step(kind, outcome)
            if item.close is not None:
                self._host.counters.took(kind, now - self._started)
        if item.mode != "hold":
            self._started = now

    def _opened(self, item: Advance, done: Advanced, calls: tuple[RunningCall, ...]) -> Begun | ToolsBegun:
        begin = item.begin
        assert begin is not None, "only a begin begins"
        note(step=done.step_number)
        log.debug("step_begun", kind=begin.kind, attempt=begin.attempt)
        assert done.turn_id is not None, "a step belongs to a turn"
        if begin.kind == "tools":
            return ToolsBegun(done.turn_id, done.turn_sequence, done.step_number, calls)
        assert begin.call_id is not None, "a model step has a call id"
        admitted = {entry.input_id for entry in begin.admit}
        while self._queue and self._queue[0].id in admitted:
            self._queue.popleft()
        self._steering = tuple(item for item in self._steering if item.id not in admitted)
        self._spent = (begin.attempt - 1) // self._per_model * self._per_model
        return Begun(
            begin.call_id,
            done.turn_id,
            done.turn_sequence,
            done.step_number,
            begin.attempt,
            done.next_sequence - 1,
            "compaction" if begin.kind == "compaction" else "model",
        )
