"""One claimed agent being run: read once, then step after step for as long as the claim is kept.

A step costs one statement: the save of this step begins the next. What was just saved is folded in, and read again only
when somebody else has written to the agent. Whether a run still owns its agent, the fence in every save decides.
Source: DESIGN §3 "Three verbs", §4; engine.md §3.2, §4.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import assert_never

import msgspec

from omnara import probes
from omnara.db.compaction import is_due
from omnara.domain.claim import Claim
from omnara.domain.compaction import plan_compaction
from omnara.domain.context import ContextState
from omnara.domain.step import CallModel, Idle, Park, RunTools, Situation, Waiting, decide
from omnara.engine.compaction import (
    Summary,
    begin_compaction,
    cannot_be_compacted,
    irreducible,
    save_checkpoint,
    save_handoff,
    save_reduction,
    too_long,
)
from omnara.engine.model_step import (
    Begun,
    Next,
    SavedOutput,
    accept_output,
    advance_for,
    begin_tools,
    save_failure,
    save_fallback,
    save_output,
    save_retry,
)
from omnara.engine.plan import StepPlan
from omnara.engine.recovery import quarantine
from omnara.engine.tool_step import Finished, RunningCall, ToolsBegun, mark_running, run_calls, save_results
from omnara.engine.turn_limit import turn_limit
from omnara.log import get_logger
from omnara.providers.protocol import Completed, Failed
from omnara.providers.replay import DamagedReplay
from omnara.tools.protocol import failed as failed_result
from omnara.worker.context_cache import DamagedLog
from omnara.worker.host import RunHost
from omnara.worker.kept_claim import KeptClaim
from omnara.worker.model_call import GiveUp, Later, OtherModel, Shorten, after_failure, call_model
from omnara.worker.saver import DataRefused
from omnara.worker.situation import read_situation, told_situation
from omnara.worker.summary import Fruitless, summarise

log = get_logger(__name__)


class AgentRun(KeptClaim):
    """Runs one claim until it is given back or lost. `run` may be cancelled at any point: the fence keeps order."""

    def __init__(self, host: RunHost, claim: Claim) -> None:
        super().__init__(host, claim)
        self._reductions = 0
        self.running: Begun | ToolsBegun | None = None
        self.effects = 0
        """Calls that run at this moment; a finished one whose result waits for its save is not among them."""

    async def run(self) -> None:
        """Begin what is due and go on until there is nothing to do. Raises what a fault of ours raises."""
        try:
            self.running = await self._begin_first()
            while self.running is not None:
                if isinstance(self.running, ToolsBegun):
                    self.running = await self._tools_step(self.running)
                elif self.running.kind == "compaction":
                    self.running = await self._compaction_step(self.running)
                else:
                    self.running = await self._model_step(self.running)
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
            return await self._advance(await self._due(decision))
        if isinstance(decision, RunTools):
            following = Next("tools", begin_tools(self.claim, await self._get_plan()))
            calls = tuple(RunningCall(call.id, call.name, call.input) for call in decision.calls)
            return await self._save(mark_running(advance_for(self.claim, following), calls), calls)
        if isinstance(decision, Park):
            return await self._advance(Next("retry", ready_s=decision.retry_in_s))
        if isinstance(decision, Waiting | Idle):
            return await self._advance(Next("wait"))
        assert_never(decision)

    async def _due(self, decision: CallModel) -> Next:
        plan = await self._get_plan()
        if decision.attempt > 1 and not decision.admit:
            async with self._host.reading() as connection:
                due = await is_due(connection, self.claim.agent_id, self.claim.step_number)
            if due:  # not the model call that it was made for, which would only be refused again
                return self._compaction_next(plan, decision.attempt)
        return self._model_next(plan, decision.admit, decision.attempt)

    # --- steps --------------------------------------------------------------------------------------------

    async def _model_step(self, begun: Begun) -> Begun | ToolsBegun | None:
        plan = self._at(await self._get_plan(), begun.attempt)
        entry = await self._memory.up_to(begun.frontier)
        context = entry.context
        if (over := turn_limit(context, self._deps.settings.turn_max_model_calls)) is not None:
            return await self._end_turn(begun, plan, over)
        if plan.problem is None and not plan.room.fits(context):
            return await self._shorten(begun, plan, context, too_long(plan, plan.room.needs(context)))
        probes.hit("model_begun", agent_id=self.claim.agent_id, attempt=begun.attempt)
        try:
            outcome = await call_model(self._deps, self.claim.agent_id, begun, plan, entry)
            output = None
            if isinstance(outcome, Completed):
                output = accept_output(begun, plan, outcome, context.truncations, context.answers)
        except DamagedReplay as damage:
            raise DamagedLog([damage.sequence], str(damage)) from damage
        except Exception:  # a fault of ours spends an attempt: it must not spin, with a paid call each time
            log.exception("model_step_fault")
            outcome, output = Failed(kind="unknown", message="the server failed at this call; its log says how"), None
        self._host.counters.attempt(outcome.kind if isinstance(outcome, Failed) else "none")
        if isinstance(outcome, Completed) and output is not None:
            return await self._save_output(begun, plan, output, outcome)
        assert isinstance(outcome, Failed), "what is completed has an output"
        return await self._save_failed(begun, plan, outcome, context)

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
        elif output.goes_on:
            following = self._model_next(upcoming, self._steering)
        else:
            following = self._after_turn(upcoming)
        item = save_output(self.claim, begun, output, usage, self._yielding(following), self._spent)
        probes.hit("saving", agent_id=self.claim.agent_id, kind="model")
        calls = tuple(RunningCall(entry.call.id, entry.call.name, entry.input) for entry in output.runnable)
        try:
            return await self._save(item, calls, kind="model")
        except DataRefused as refused:
            failure = Failed(kind="unknown", message=f"the answer of the model cannot be stored: {refused}")
            return await self._save(
                save_failure(self.claim, begun, plan, failure, self._after_turn(plan)), kind="model"
            )

    async def _save_failed(
        self, begun: Begun, plan: StepPlan, failure: Failed, context: ContextState
    ) -> Begun | ToolsBegun | None:
        after = after_failure(self._deps.settings, failure, begun, 1 + len(plan.fallbacks))
        if isinstance(after, Later):
            retry = save_retry(self.claim, begun, failure, after.delay_s)
            return await self._save(retry, kind=begun.kind, outcome="retry")
        if isinstance(after, OtherModel):
            log.warning("model_replaced", model=plan.target.slug, error=failure.kind, attempt=after.attempt)
            upcoming = await self._upcoming(plan)
            compacts = begun.kind == "compaction"
            make = self._compaction_next if compacts else self._model_call_next
            following = self._yielding(make(upcoming, after.attempt))
            item = save_fallback(self.claim, begun, failure, following, after.attempt)
            return await self._save(item, kind=begun.kind, outcome="fallback")
        if isinstance(after, Shorten) and begun.kind == "model":
            return await self._shorten(begun, plan, context, failure)
        if isinstance(after, Shorten | GiveUp):
            return await self._end_turn(begun, plan, failure)
        assert_never(after)

    def _model_call_next(self, plan: StepPlan, attempt: int) -> Next:
        return self._model_next(plan, (), attempt)

    async def _end_turn(self, begun: Begun, plan: StepPlan, failure: Failed) -> Begun | ToolsBegun | None:
        following = self._yielding(self._after_turn(await self._upcoming(plan)))
        item = save_failure(self.claim, begun, plan, failure, following)
        return await self._save(item, kind=begun.kind, outcome="failed")

    # --- compaction ---------------------------------------------------------------------------------------

    def _compaction_next(self, plan: StepPlan, attempt: int) -> Next:
        return Next("compact", begin_compaction(self.claim, self._at(plan, attempt), attempt))

    async def _shorten(
        self, begun: Begun, plan: StepPlan, context: ContextState, failure: Failed
    ) -> Begun | ToolsBegun | None:
        """The conversation is too long for a model call: a compaction takes its place, or the turn ends."""
        if plan_compaction(context, plan.room) is None:
            return await self._end_turn(begun, plan, cannot_be_compacted(plan, plan.room.needs(context)))
        self._reductions = 0
        # Kept even when others wait: whoever claims next would ask the model first, and be refused again.
        following = self._compaction_next(await self._upcoming(plan), begun.attempt)
        return await self._save(save_handoff(self.claim, begun, failure, following), kind="model", outcome="compact")

    async def _compaction_step(self, begun: Begun) -> Begun | ToolsBegun | None:
        plan = self._at(await self._get_plan(), begun.attempt)
        context = (await self._memory.up_to(begun.frontier)).context
        probes.hit("compaction_begun", agent_id=self.claim.agent_id, attempt=begun.attempt)
        outcome: Summary | Fruitless | Failed
        if plan.problem is not None:
            outcome = Failed(kind="invalid_request", message=plan.problem)
        else:
            try:
                outcome = await summarise(self._deps, plan, context, self._reductions)
            except Exception:  # a fault of ours spends an attempt, as in a model step
                log.exception("compaction_step_fault")
                outcome = Failed(kind="unknown", message="the server failed at this call; its log says how")
        self._host.counters.attempt(outcome.kind if isinstance(outcome, Failed) else "none")
        if isinstance(outcome, Failed):
            return await self._save_failed(begun, plan, outcome, context)
        upcoming = await self._upcoming(plan)
        if isinstance(outcome, Fruitless):
            self._reductions += 1
            following = self._compaction_next(upcoming, begun.attempt)  # kept: only this run knows how often
            item = save_reduction(self.claim, begun, outcome.reason, outcome.usage, following)
            return await self._save(item, kind="compaction", outcome="reduced")
        probes.hit("saving", agent_id=self.claim.agent_id, kind="compaction")
        following = self._yielding(self._model_next(upcoming, self._steering))
        item = save_checkpoint(self.claim, begun, context, outcome, following, self._spent)
        try:
            return await self._save(item, kind="compaction")
        except DataRefused as refused:
            return await self._end_turn(begun, plan, irreducible(f"it cannot be stored: {refused}"))

    async def _tools_step(self, begun: ToolsBegun) -> Begun | ToolsBegun | None:
        plan = await self._get_plan()
        calls = [call for call in begun.calls if not call.is_transactional]
        transactional = [call for call in begun.calls if call.is_transactional]
        if not await self._settle_all(transactional, others_run=bool(calls)):
            return None
        if not calls:
            return await self._save_finished(begun, [], await self._after_tools(plan))
        await self._host.may_start_effects()
        probes.hit("tools_started", agent_id=self.claim.agent_id, calls=len(calls))
        self.effects = len(calls)
        async with aclosing(run_calls(self.claim.agent_id, calls, self._host.tools)) as groups:
            async for finished in groups:
                self.effects -= len(finished)
                self._open_calls -= len(finished)
                if self.effects:
                    if await self._save_finished(begun, finished, None) is None:
                        return None
                    continue
                return await self._save_finished(begun, finished, await self._after_tools(plan))
        raise AssertionError("a tools step has at least one call")

    async def _after_tools(self, plan: StepPlan) -> Next:
        if self._unsettled:
            return Next("tools", ready_s=0.0)
        upcoming = await self._upcoming(plan)
        return self._yielding(Next("wait") if self._open_calls else self._model_next(upcoming, self._steering))

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
