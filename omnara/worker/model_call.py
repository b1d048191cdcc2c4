"""One attempt of a model call under a claim: deltas out, outcome back, and when to try again.

Source: engine.md §5; DESIGN §5, §6 (deltas are published for every attempt, told apart by their call's id).
"""

from __future__ import annotations

from uuid import UUID

from omnara.domain.stream import ErrorDelta, StreamDelta, StreamFault
from omnara.engine.deps import Deps
from omnara.engine.feed import ModelDelta
from omnara.engine.model_step import Begun
from omnara.engine.plan import StepPlan
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.protocol import Completed, Failed, ModelCall
from omnara.providers.retry import BASE_DELAY_S, RetryIn, decide_retry, delay_s
from omnara.setting_table import Settings
from omnara.worker.context_cache import CachedContext
from omnara.worker.refusals import call_with_files


async def call_model(
    deps: Deps, agent_id: UUID, begun: Begun, plan: StepPlan, entry: CachedContext
) -> Completed | Failed:
    """Make the attempt. A refusal of replayed provider content is answered at once by one call without it, and one that
    may be about a file by calls without the newest files, then without any.

    Readers hear of a failure when it is the attempt's: of a refusal only if they have seen blocks, which are void then.
    Cancellation closes the connection to the provider. Raises DamagedReplay when stored provider content is unreadable.
    """
    if plan.problem is not None:
        return Failed(kind="invalid_request", message=plan.problem)
    call = ModelCall(
        target=plan.target,
        system=plan.system,
        tools=plan.tools,
        context=entry.context,
        history=entry.history,
        new_call_id=new_call_id,
    )
    sink = _Sink(deps, agent_id, begun)
    outcome = await call_with_files(deps, agent_id, call, sink)
    if isinstance(outcome, Failed):
        sink.fail(outcome)
    return outcome


def next_delay(settings: Settings, failure: Failed, begun: Begun) -> float | None:
    """Seconds until the next attempt, or None when the turn ends with this error.

    The schedule is the providers' (1, 2, 4 … 30 s with jitter), scaled by the settings so that tests can shrink it;
    what the provider asks for is never shortened.
    """
    context_id = str(begun.call_id)
    verdict = decide_retry(
        failure, begun.attempt, context_id, replay_suppressed=True, max_attempts=settings.model_retries + 1
    )
    if not isinstance(verdict, RetryIn):
        return None
    own = delay_s(begun.attempt, context_id) / BASE_DELAY_S * settings.model_retry_base_s
    return max(min(own, settings.model_retry_cap_s), failure.retry_after_s or 0.0)


def new_call_id() -> tuple[UUID, str]:
    """A tool call's id with its public form."""
    value = new_uuid()
    return value, encode(IdKind.TOOL_CALL, value)


class _Sink:
    """Numbers the deltas of one attempt and gives them to the feed while anybody listens.

    An error is not passed on by itself: whether it ends the attempt is decided after it, by `call_model`.
    """

    __slots__ = ("_agent_id", "_call_id", "_feed", "_seq", "_turn_id")

    def __init__(self, deps: Deps, agent_id: UUID, begun: Begun) -> None:
        self._feed = deps.feed
        self._agent_id = agent_id
        self._turn_id = encode(IdKind.TURN, begun.turn_id)
        self._call_id = encode(IdKind.MODEL_CALL, begun.call_id)
        self._seq = 0

    @property
    def shown(self) -> int:
        """How many deltas there have been."""
        return self._seq

    def fail(self, failure: Failed) -> None:
        """Tell that what has been shown comes to nothing, and why."""
        self._give(ErrorDelta(StreamFault(failure.message)))

    def __call__(self, delta: StreamDelta) -> None:
        if not isinstance(delta, ErrorDelta):
            self._give(delta)

    def _give(self, delta: StreamDelta) -> None:
        self._seq += 1
        if self._feed.wants_deltas(self._agent_id):
            self._feed.delta(self._agent_id, ModelDelta(self._turn_id, self._call_id, self._seq, delta))
