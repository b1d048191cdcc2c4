"""Whatever the log, the request built from it is one that a strict provider takes, and the next one continues it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from omnara.domain.content import TextBlock, ToolCallBlock
from omnara.domain.context import ContextState
from omnara.domain.events import Event, EventMeta, ModelOutputPayload
from omnara.providers import ModelCall, ModelTarget, RenderedHistory
from omnara.providers.anthropic_messages import AnthropicMessages
from omnara.providers.openai_chat import OpenAIChat
from omnara.providers.openai_responses import OpenAIResponses
from omnara.providers.replay import Replay, pack
from omnara.testing import ModelSpec, Strictness, strict_anthropic, strict_chat, strict_responses
from omnara.testing.signatures import Signer
from omnara.testing.strict import Context
from tests.support.agent_log import LOOK, Log, new_call_id
from tests.support.any_log import Void, logs, voids

WIRES: Any = {
    "anthropic_messages": (AnthropicMessages(), strict_anthropic.check),
    "openai_chat_completions": (OpenAIChat(), strict_chat.check),
    "openai_responses": (OpenAIResponses(), strict_responses.check),
}
STRICT = Context(strictness=Strictness(), spec=ModelSpec(), signer=Signer(), tokens=1)


def call(api_format: str, context: ContextState, history: RenderedHistory) -> ModelCall:
    target = ModelTarget(revision_id="r", provider="p", api_format=api_format, slug="scripted")
    return ModelCall(
        target=target, system="Be brief.", tools=(LOOK,), context=context, history=history, new_call_id=new_call_id
    )


@pytest.mark.parametrize("api_format", WIRES)
@settings(max_examples=150, deadline=None)
@given(logs(), voids)
def test_requests_are_well_formed_and_the_slot_changes_nothing(api_format: str, log: Log, void: Void) -> None:
    wire, check = WIRES[api_format]
    context, history = ContextState(void), RenderedHistory()
    for event in log.events:
        context.apply(event)
        body = wire.body(call(api_format, context, history))
        check(msgspec.json.decode(body), STRICT)
        fresh = ContextState(void)
        fresh.extend(log.events[: event.sequence])
        assert wire.body(call(api_format, fresh, RenderedHistory())) == body


def with_replay(event: Event, api_format: str) -> Event:
    """The same output, from the model that is asked, under ids that it counts from zero every time."""
    if not isinstance(event.payload, ModelOutputPayload):
        return event
    calls = sum(isinstance(block, ToolCallBlock) for block in event.payload.content_blocks)
    replay = pack(Replay(api_format, tuple(f"call_{number}" for number in range(calls))))
    meta = EventMeta(event.meta.frontier, "p", api_format, "scripted", "r")
    return msgspec.structs.replace(event, replay=replay, meta=meta)


@pytest.mark.parametrize("api_format", WIRES)
@settings(max_examples=100, deadline=None)
@given(logs())
def test_ids_of_the_provider_stay_paired_and_unique(api_format: str, log: Log) -> None:
    wire, check = WIRES[api_format]
    context, history = ContextState(), RenderedHistory()
    for event in log.events:
        context.apply(with_replay(event, api_format))
        check(msgspec.json.decode(wire.body(call(api_format, context, history))), STRICT)


def finish(log: Log, number: int) -> None:
    """An answer, an empty one, a failure, or none at all."""
    if number == 2:
        log.error("away")
    elif number == 4:
        log.output()
    elif number != 3:
        log.output(TextBlock("said"))


@pytest.mark.parametrize("api_format", WIRES)
def test_each_request_begins_with_the_one_before_it_up_to_its_mark(api_format: str) -> None:
    wire, _ = WIRES[api_format]
    log = Log()
    context, history = ContextState(), RenderedHistory()
    bodies = []
    for number in range(7):
        log.user(f"question {number}")
        if number % 2:
            log.config_change()
        context.extend(log.events)
        bodies.append(wire.body(call(api_format, context, history)))
        finish(log, number)
    for before, after in pairwise(bodies):
        mark = before.rindex(b',"cache_control"') if api_format == "anthropic_messages" else before.rindex(b'"}')
        assert after.startswith(before[:mark])
        assert len(after) > len(before)
