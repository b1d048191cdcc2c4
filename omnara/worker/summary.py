"""The model call of a compaction step: no deltas, and an answer that is a summary or nothing."""

from __future__ import annotations

import msgspec

from omnara.domain.compaction import MAX_REDUCTIONS, CompactionPlan, plan_compaction
from omnara.domain.context import ContextState
from omnara.engine.compaction import Summary, Unusable, cannot_be_compacted, irreducible, read_summary, summary_call
from omnara.engine.deps import Deps
from omnara.engine.plan import StepPlan
from omnara.log import get_logger
from omnara.providers.protocol import Completed, Failed

log = get_logger(__name__)


class Fruitless(msgspec.Struct, frozen=True):
    """Nothing came of the call; a smaller source may do better."""

    reason: str
    usage: str | None = None


async def summarise(deps: Deps, plan: StepPlan, context: ContextState, reductions: int) -> Summary | Fruitless | Failed:
    """Plan, ask for a summary and judge the answer. A Failed may be tried again if its kind says so.

    Nothing is streamed and nothing written. Cancellation closes the connection to the provider.
    """
    compaction = plan_compaction(context, plan.room, reductions)
    if compaction is None:
        return cannot_be_compacted(plan, plan.room.needs(context))
    outcome = await deps.gateway.call(summary_call(plan, context, compaction), None)
    if isinstance(outcome, Completed):
        return _judged(compaction, outcome, reductions)
    if outcome.kind in ("context_window", "payload_too_large"):
        return _fruitless(outcome.message, None, reductions)
    return outcome


def _judged(compaction: CompactionPlan, done: Completed, reductions: int) -> Summary | Fruitless | Failed:
    usage = msgspec.json.encode(done.usage).decode()
    text = read_summary(done, compaction)
    if isinstance(text, Unusable):
        return _fruitless(text.reason, usage, reductions)
    return Summary(compaction.cut.through, text, usage)


def _fruitless(reason: str, usage: str | None, reductions: int) -> Fruitless | Failed:
    log.info("compaction_fruitless", reason=reason, reductions=reductions)
    return irreducible(reason) if reductions >= MAX_REDUCTIONS else Fruitless(reason, usage)
