"""One attempt of a model call under a claim: deltas out, outcome back, and when to try again.

Source: engine.md §5; DESIGN §5, §6 (deltas are published for every attempt, told apart by their call's id).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.domain.stream import ErrorDelta, StreamDelta, StreamFault
from omnara.engine.deps import Deps
from omnara.engine.feed import ModelDelta
from omnara.engine.model_step import Begun
from omnara.engine.plan import StepPlan
from omnara.ids import IdKind, encode, new_uuid
from omnara.providers.protocol import Completed, Failed, ModelCall
from omnara.providers.retry import BASE_DELAY_S, Compact, RetryIn, Stop, decide_retry, delay_s
from omnara.setting_table import Settings
from omnara.worker.context_cache import CachedContext
from omnara.worker.refusals import call_with_files

_OVERLOAD: Final = (503, 529)
LONG_WAIT_S: Final = 60.0
"""A provider that asks for a longer wait than this is passed over when the config names another model."""


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


class Later(msgspec.Struct, frozen=True):
    """Try the same again after `delay_s`."""

    delay_s: float


class OtherModel(msgspec.Struct, frozen=True):
    """The next model of the list takes over, at once, with attempt number `attempt`."""

    attempt: int


class Shorten(msgspec.Struct, frozen=True):
    """The conversation is too long: make it smaller first."""


class GiveUp(msgspec.Struct, frozen=True):
    """The turn ends with this error."""


AfterFailure = Later | OtherModel | Shorten | GiveUp


def after_failure(settings: Settings, failure: Failed, begun: Begun, models: int = 1) -> AfterFailure:
    """Decide what follows a failed attempt, when the config names `models` models.

    Each model has its own attempts. The next one takes over when those of one are used up, or at once when it is
    overloaded or asks for a long wait: another may have room now. Errors that no other try would mend end the turn.
    """
    per_model = settings.model_retries + 1
    index = min((begun.attempt - 1) // per_model, models - 1)
    attempt = begun.attempt - index * per_model
    context_id = str(begun.call_id)
    verdict = decide_retry(failure, attempt, context_id, replay_suppressed=True, max_attempts=per_model)
    if isinstance(verdict, Compact):
        return Shorten()
    spent = isinstance(verdict, Stop) and verdict.exhausted
    full = isinstance(verdict, RetryIn) and (is_overload(failure) or (failure.retry_after_s or 0.0) > LONG_WAIT_S)
    if index + 1 < models and (spent or full):
        return OtherModel((index + 1) * per_model + 1)
    if not isinstance(verdict, RetryIn):
        return GiveUp()
    # The schedule is the providers' (1, 2, 4 … 30 s with jitter), scaled by the settings so that tests can shrink it;
    # what the provider asks for is never shortened.
    own = delay_s(attempt, context_id) / BASE_DELAY_S * settings.model_retry_base_s
    return Later(max(min(own, settings.model_retry_cap_s), failure.retry_after_s or 0.0))


def is_overload(failure: Failed) -> bool:
    """Whether a provider says that it has too much to do just now, in a status or inside a stream."""
    if failure.kind != "provider_unavailable":
        return False
    return failure.status in _OVERLOAD or "overloaded" in failure.provider_code


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
