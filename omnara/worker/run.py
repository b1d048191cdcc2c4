"""One claimed agent being run: read once, then step after step for as long as the claim is kept.

A step costs one statement: the save of this step begins the next. What was just saved is folded in, and read again only
when somebody else has written to the agent. Whether a run still owns its agent, the fence in every save decides.
Source: DESIGN §3 "Three verbs", §4; engine.md §3.2, §4.
"""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from typing import assert_never

import msgspec

from omnara import probes
from omnara.clock import monotonic
from omnara.db.failures import DatabaseUnavailable
from omnara.domain.advance import Advance, Advanced
from omnara.domain.claim import Claim
from omnara.domain.step import CallModel, Idle, Park, RunTools, Situation, Waiting, WaitingInput, decide
from omnara.engine.model_step import (
    Begun,
    Next,
    SavedOutput,
    accept_output,
    advance_for,
    begin_model,
    begin_tools,
    save_failure,
    save_output,
    save_retry,
)
from omnara.engine.plan import StepPlan
from omnara.engine.recovery import quarantine
from omnara.engine.tool_step import Finished, RunningCall, ToolsBegun, mark_running, run_calls, save_results
from omnara.log import get_logger, note
from omnara.providers.protocol import Completed, Failed
from omnara.providers.replay import DamagedReplay
from omnara.tools.protocol import failed as failed_result
from omnara.worker.context_cache import DamagedLog
from omnara.worker.host import RunHost
from omnara.worker.memory import Memory
from omnara.worker.model_call import call_model, next_delay
from omnara.worker.saver import DataRefused
from omnara.worker.situation import read_situation, told_situation
from omnara.worker.tell import tell_saved

log = get_logger(__name__)


class AgentRun:
    """Runs one claim until it is given back or lost. `run` may be cancelled at any point: the fence keeps order."""

    def __init__(self, host: RunHost, claim: Claim) -> None:
        self.claim = claim
        self._host = host
        self._deps = host.deps
        self._queue: deque[WaitingInput] = deque()
        self._steering: tuple[WaitingInput, ...] = ()
        self._more_queued = False
        self._open_calls = claim.open_calls
        self._plan: StepPlan | None = None
        self._memory = Memory(host, claim)
        self._started = 0.0
        self.running: Begun | ToolsBegun | None = None
        self.effects = 0
        """Calls that run at this moment; a finished one whose result waits for its save is not among them."""

    async def run(self) -> None:
        """Begin what is due and go on until there is nothing to do. Raises what a fault of ours raises."""
        try:
            self.running = await self._begin_first()
            while self.running is not None:
                if isinstance(self.running, Begun):
                    self.running = await self._model_step(self.running)
                else:
                    self.running = await self._tools_step(self.running)
                self.claim.steps_done += 1
                if self.claim.deaths:
                    self._host.cleared(self.claim)
        except (DamagedLog, DataRefused, msgspec.MsgspecError) as damage:
            if isinstance(self.running, ToolsBegun):
                raise  # the running calls must get their results: the worker gives the claim back
            # Rows of this agent's own; to try again would meet them again. What was folded may have a hole.
            self._memory.forget()
            void = damage.void if isinstance(damage, DamagedLog) else ()
            await quarantine(self._deps, self.claim, self._host.worker_id, void, str(damage))
        finally:
            self._memory.close()

    # --- the first step of a claim ------------------------------------------------------------------------

    async def _begin_first(self) -> Begun | ToolsBegun | None:
        log_from = self._memory.open()
        told = told_situation(self.claim) if self._memory.is_current else None
        if told is not None:
            situation, queued = told
        else:
            async with self._host.reading() as connection:
                situation, queued, rows = await read_situation(connection, self.claim, log_from)
            self._memory.absorb(rows)
        self._queue.extend(queued)
        self._steering = situation.steering
        self._more_queued = len(queued) > 1
        return await self._carry_out(situation)

    async def _carry_out(self, situation: Situation) -> Begun | ToolsBegun | None:
        decision = decide(situation)
        if isinstance(decision, CallModel):
            return await self._advance(self._model_next(await self._get_plan(), decision.admit, decision.attempt))
        if isinstance(decision, RunTools):
            following = Next("tools", begin_tools(self.claim, await self._get_plan()))
            item = mark_running(advance_for(self.claim, following), [call.id for call in decision.calls])
            calls = tuple(RunningCall(call.id, call.name, call.input) for call in decision.calls)
            return await self._save(item, calls)
        if isinstance(decision, Park):
            return await self._advance(Next("retry", ready_s=decision.retry_in_s))
        if isinstance(decision, Waiting | Idle):
            return await self._advance(Next("wait"))
        assert_never(decision)

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

    def _model_next(self, plan: StepPlan, admit: tuple[WaitingInput, ...], attempt: int) -> Next:
        return Next("model", begin_model(self.claim, plan, admit, attempt))

    # --- steps --------------------------------------------------------------------------------------------

    async def _model_step(self, begun: Begun) -> Begun | ToolsBegun | None:
        plan = await self._get_plan()
        entry = await self._memory.up_to(begun.frontier)
        probes.hit("model_begun", agent_id=self.claim.agent_id, attempt=begun.attempt)
        try:
            outcome = await call_model(self._deps, self.claim.agent_id, begun, plan, entry)
            output = accept_output(begun, plan, outcome) if isinstance(outcome, Completed) else None
        except DamagedReplay as damage:
            raise DamagedLog([damage.sequence], str(damage)) from damage
        except Exception:  # a fault of ours spends an attempt: it must not spin, with a paid call each time
            log.exception("model_step_fault")
            outcome, output = Failed(kind="unknown", message="the server failed at this call; its log says how"), None
        self._host.counters.attempt(outcome.kind if isinstance(outcome, Failed) else "none")
        if isinstance(outcome, Completed) and output is not None:
            return await self._save_output(begun, plan, output, outcome)
        assert isinstance(outcome, Failed), "what is completed has an output"
        return await self._save_failed(begun, plan, outcome)

    async def _save_output(
        self, begun: Begun, plan: StepPlan, output: SavedOutput, done: Completed
    ) -> Begun | ToolsBegun | None:
        upcoming = await self._upcoming(plan)
        self._open_calls = output.open_calls
        usage = msgspec.json.encode(done.usage).decode()
        if output.runnable:
            following = Next("tools", begin_tools(self.claim, upcoming))
        elif output.open_calls:
            following = Next("wait")
        elif output.calls:
            following = self._model_next(upcoming, self._steering, 1)
        else:
            following = self._after_turn(upcoming)
        item = save_output(self.claim, begun, output, usage, self._yielding(following))
        probes.hit("saving", agent_id=self.claim.agent_id, kind="model")
        calls = tuple(RunningCall(entry.call.id, entry.call.name, entry.input) for entry in output.runnable)
        try:
            return await self._save(item, calls, kind="model")
        except DataRefused as refused:
            failure = Failed(kind="unknown", message=f"the answer of the model cannot be stored: {refused}")
            return await self._save(
                save_failure(self.claim, begun, plan, failure, self._after_turn(plan)), kind="model"
            )

    async def _save_failed(self, begun: Begun, plan: StepPlan, failure: Failed) -> Begun | ToolsBegun | None:
        delay_s = next_delay(self._deps.settings, failure, begun)
        if delay_s is not None:
            return await self._save(save_retry(self.claim, begun, failure, delay_s), kind="model", outcome="retry")
        following = self._yielding(self._after_turn(await self._upcoming(plan)))
        return await self._save(
            save_failure(self.claim, begun, plan, failure, following), kind="model", outcome="failed"
        )

    def _after_turn(self, plan: StepPlan) -> Next:
        """The turn is over: the next queued input that is known of opens the next one."""
        if self._queue:
            return self._model_next(plan, (self._queue[0],), 1)
        return Next("idle", ready_s=0.0 if self._more_queued else None)

    async def _tools_step(self, begun: ToolsBegun) -> Begun | ToolsBegun | None:
        plan = await self._get_plan()
        await self._host.may_start_effects()
        probes.hit("tools_started", agent_id=self.claim.agent_id, calls=len(begun.calls))
        self.effects = len(begun.calls)
        async with aclosing(run_calls(self.claim.agent_id, begun.calls, self._host.tools)) as groups:
            async for finished in groups:
                self.effects -= len(finished)
                self._open_calls -= len(finished)
                if self.effects:
                    if await self._save_finished(begun, finished, None) is None:
                        return None
                    continue
                upcoming = await self._upcoming(plan)
                following = Next("wait") if self._open_calls else self._model_next(upcoming, self._steering, 1)
                return await self._save_finished(begun, finished, self._yielding(following))
        raise AssertionError("a tools step has at least one call")

    async def _save_finished(
        self, begun: ToolsBegun, finished: list[Finished], following: Next | None
    ) -> Begun | ToolsBegun | None:
        probes.hit("saving", agent_id=self.claim.agent_id, kind="tools")
        try:
            return await self._save(save_results(self.claim, begun, finished, following), kind="tools", held=begun)
        except DataRefused as refused:
            log.error("tool_result_refused", detail=str(refused))
            result = failed_result("The result of the tool cannot be stored.", "unstorable_result")
            plain = [Finished(entry.call, result) for entry in finished]
            return await self._save(save_results(self.claim, begun, plain, following), kind="tools", held=begun)

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
        return Begun(
            begin.call_id, done.turn_id, done.turn_sequence, done.step_number, begin.attempt, done.next_sequence - 1
        )
