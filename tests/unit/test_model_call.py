"""One attempt of a model call as its readers see it, above all when it takes two requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from omnara.domain.context import ContextState
from omnara.domain.stream import BlockStart, Sink, TextStreamBlock
from omnara.engine.deps import Deps
from omnara.engine.feed import Feed
from omnara.engine.feed_items import Delta
from omnara.engine.model_step import Begun
from omnara.engine.plan import StepPlan
from omnara.ids import new_uuid
from omnara.providers import Completed, Failed, ModelCall, ModelGateway, ModelTarget, Outcome, RenderedHistory, say
from omnara.providers.in_process import InProcessAdapter
from omnara.worker.model_call import call_model

AGENT = new_uuid()
REFUSED = Failed(kind="replay_rejected", message="signature mismatch", status=400)
BUSY = Failed(kind="provider_unavailable", message="busy", status=503)


class Scripted:
    """An adapter that answers in turn; `opens` says which answers show a block before they fail."""

    def __init__(self, answers: Sequence[Outcome], opens: frozenset[int] = frozenset()) -> None:
        self._inner = InProcessAdapter(lambda _: answers[len(self.calls) - 1])
        self._opens = opens
        self.calls: list[ModelCall] = []

    async def call(self, call: ModelCall, sink: Sink | None) -> Outcome:
        """Answer, with the deltas that an adapter sends: an error of its own at the end of each failure."""
        self.calls.append(call)
        if sink is not None and len(self.calls) in self._opens:
            sink(BlockStart(0, TextStreamBlock()))
        return await self._inner.call(call, sink)

    async def close(self) -> None:
        """Nothing is held."""


class Entry:
    """As much of a cached conversation as a call needs."""

    context = ContextState()
    history = RenderedHistory()


async def seen_by_a_reader(adapter: Scripted) -> tuple[Completed | Failed, list[str]]:
    """Make the attempt and return its outcome and the kinds of the deltas that a stream of this agent gets."""
    feed, gateway = Feed(), ModelGateway()
    gateway.register("scripted", adapter)
    target = ModelTarget(revision_id="r", provider="p", slug="m", api_format="scripted")
    plan = StepPlan(UUID(int=1), None, target, "", (), {})
    unused: Any = None
    deps = Deps(unused, unused, feed, unused, unused, gateway, unused, unused, unused)
    reader = feed.subscribe(AGENT, deltas=True)
    entry: Any = Entry()
    outcome = await call_model(deps, AGENT, Begun(new_uuid(), new_uuid(), 1, 1, 1, 1), plan, entry)
    items = reader.take().items
    feed.unsubscribe(reader)
    await gateway.close()
    runs = [item for item in items if isinstance(item, Delta)]
    assert [run.first for run in runs] == list(range(1, len(runs) + 1)), "numbered without gaps"
    return outcome, [json.loads(run.event_json())["kind"] for run in runs]


ANSWER = ["block_start", "text_delta", "block_stop", "message_stop"]


async def test_a_refused_replay_that_showed_nothing_is_repeated_unseen() -> None:
    adapter = Scripted([REFUSED, say("hello")])
    outcome, kinds = await seen_by_a_reader(adapter)
    assert isinstance(outcome, Completed)
    assert [call.suppress_replay for call in adapter.calls] == [False, True]
    assert kinds == ANSWER


async def test_blocks_that_a_refusal_makes_void_are_told_to_be() -> None:
    adapter = Scripted([REFUSED, say("hello")], opens=frozenset({1}))
    outcome, kinds = await seen_by_a_reader(adapter)
    assert isinstance(outcome, Completed)
    assert kinds == ["block_start", "error", *ANSWER]


async def test_a_failure_that_stays_is_told_once() -> None:
    for answers in ([BUSY], [REFUSED, BUSY], [REFUSED, REFUSED]):
        adapter = Scripted(answers)
        outcome, kinds = await seen_by_a_reader(adapter)
        assert outcome == answers[-1]
        assert (len(adapter.calls), kinds) == (len(answers), ["error"])
