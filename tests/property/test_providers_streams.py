"""Whatever an endpoint sends, an attempt ends in a way that the engine knows, and what it accepts is sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.domain.content import ReasoningBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.events import EventMeta
from omnara.domain.stream import BlockStart, BlockStop, StreamDelta
from omnara.providers import Completed, Failed, ModelCall, ModelTarget, RenderedHistory
from omnara.providers.anthropic_messages import AnthropicMessages
from omnara.providers.json_events import BadEvent
from omnara.providers.openai_chat import OpenAIChat
from omnara.providers.openai_responses import OpenAIResponses
from omnara.providers.output import OutputBuilder
from omnara.providers.protocol import Outcome
from omnara.providers.replay import unpack
from omnara.providers.sse import SseParser
from omnara.providers.streaming import StreamedError
from omnara.testing import ModelSpec, Strictness, strict_anthropic, strict_chat, strict_responses
from omnara.testing.signatures import Signer
from omnara.testing.strict import Context
from tests.support.agent_log import Log, new_call_id, stored

TEXTS = ("", " ", "x", "\x00", "😀", "stop", "{}", "a b", "x" * 70, "rs_1", "fc_1", "reasoning", "message", "refusal")
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "text"]), inner, max_size=2),
    max_leaves=4,
)


def _anthropic() -> list[Any]:
    def delta(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": fields}

    def start(index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": fields}

    def stop(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    return [
        {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
        start(0, type="thinking", thinking="", signature=""),
        delta(0, type="thinking_delta", thinking="hm"),
        delta(0, type="signature_delta", signature="abc"),
        stop(0),
        start(1, type="text", text=""),
        delta(1, type="text_delta", text="so"),
        stop(1),
        start(2, type="tool_use", id="x", name="look", input={}),
        delta(2, type="input_json_delta", partial_json='{"n":1}'),
        stop(2),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def _chat() -> list[Any]:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **fields}]}

    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "so"},
        call(0, id="x", function={"name": "look", "arguments": ""}),
        call(0, function={"arguments": '{"n":1}'}),
        call(1, id="y", function={"name": "look", "arguments": "{}"}),
    ]
    return [
        *({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
        "[DONE]",
    ]


def _responses() -> list[Any]:
    def item(index: int, end: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.output_item.{end}", "output_index": index, "item": fields}

    def delta(kind: str, index: int, text: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}.delta", "output_index": index, "delta": text, **fields}

    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"type": "message", "id": "msg_1", "role": "assistant"}
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look"}
    text = {"type": "output_text", "text": "so", "annotations": []}
    return [
        {"type": "response.created", "response": {"status": "in_progress"}},
        item(0, "added", **{**thought, "summary": []}),
        delta("reasoning_summary_text", 0, "hm", summary_index=0),
        item(0, "done", **thought, encrypted_content="abc"),
        item(1, "added", **said, content=[]),
        delta("output_text", 1, "so", content_index=0),
        item(1, "done", **said, content=[text], status="completed"),
        item(2, "added", **call, arguments=""),
        delta("function_call_arguments", 2, '{"n":1}'),
        {"type": "response.function_call_arguments.done", "output_index": 2, "arguments": '{"n":1}'},
        item(2, "done", **call, arguments='{"n":1}', status="completed"),
        {"type": "response.completed", "response": {"status": "completed", "usage": {"input_tokens": 3}}},
    ]


WIRES: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    "anthropic": (AnthropicMessages(), _anthropic),
    "chat": (OpenAIChat(), _chat),
    "responses": (OpenAIResponses(), _responses),
}


def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: spoiled(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], spoiled(draw, value[at]), *value[at + 1 :]]
    return draw(JSON)


@st.composite
def streams(draw: st.DrawFn, events: list[Any]) -> bytes:
    """A sound stream with up to three things wrong."""
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(events) - 1))
        change = draw(st.sampled_from(["drop", "twice", "swap", "spoil", "bytes"]))
        if change == "drop":
            events = [*events[:at], *events[at + 1 :]] or [None]
        elif change == "twice":
            events = [*events[:at], events[at], *events[at:]]
        elif change == "swap":
            events = [*events[at:], *events[:at]]
        elif change == "spoil":
            events = [*events[:at], spoiled(draw, events[at]), *events[at + 1 :]]
        else:
            events = [*events[:at], draw(st.binary(max_size=12)), *events[at + 1 :]]
    return b"".join(b"data: " + _data(event) + b"\n\n" for event in events)


def _data(event: Any) -> bytes:
    if isinstance(event, bytes):
        return event
    return event.encode() if event == "[DONE]" else msgspec.json.encode(event)


def attempt(wire: Any, stream: bytes, deltas: list[StreamDelta]) -> Outcome | None:
    """What the stream comes to; None when it is refused as an answer."""
    parser = SseParser()
    assembler = wire.assembler(None, OutputBuilder(new_call_id, deltas.append))
    try:
        for data in parser.feed(stream):
            assembler.event(data)
            if assembler.done:
                break
    except (BadEvent, StreamedError):
        return None
    result: Outcome | None = assembler.finish("") if assembler.complete else None
    return result


@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_streams_with_things_wrong(name: str, data: st.DataObject) -> None:
    wire, events = WIRES[name]
    deltas: list[StreamDelta] = []
    outcome = attempt(wire, data.draw(streams(events())), deltas)
    msgspec.json.encode(deltas)
    starts = [delta.block_index for delta in deltas if isinstance(delta, BlockStart)]
    assert starts == list(range(len(starts)))
    if outcome is None:
        return
    assert sorted(delta.block_index for delta in deltas if isinstance(delta, BlockStop)) == starts
    assert isinstance(outcome, (Completed, Failed))
    if isinstance(outcome, Completed):
        check_sound(outcome)
        check_repeatable(name, outcome)


class Trusting(Signer):
    """Takes every signature for its own: what is checked here is all the rest."""

    def verify(self, model: str, text: str, signature: str) -> bool:
        return True

    def unseal(self, model: str, data: str, label: str = "") -> bool:
        return True


STRICT = Context(strictness=Strictness(), spec=ModelSpec(), signer=Trusting(), tokens=1)


def check_repeatable(name: str, outcome: Completed) -> None:
    """The request after this answer is one that its provider takes: a bad answer must not end the conversation."""
    api_format, check = CHECKS[name]
    target = ModelTarget(revision_id="r", provider="p", api_format=api_format, slug="scripted", supports_reasoning=True)
    log = Log()
    log.user("go")
    meta = EventMeta(1, "p", api_format, "scripted", "r")
    log.output(*map(stored, outcome.blocks), stop=outcome.stop_reason, meta=meta, replay=outcome.replay)
    for made in outcome.calls:
        log.result(made.public_id, TextBlock("ok"))
    log.user("on")
    context = ContextState()
    context.extend(log.events)
    call = ModelCall(
        target=target, system="", tools=(), context=context, history=RenderedHistory(), new_call_id=new_call_id
    )
    check(msgspec.json.decode(WIRES[name][0].body(call)), STRICT)


CHECKS: dict[str, tuple[str, Callable[[Any, Context], None]]] = {
    "anthropic": ("anthropic_messages", strict_anthropic.check),
    "chat": ("openai_chat_completions", strict_chat.check),
    "responses": ("openai_responses", strict_responses.check),
}


def check_sound(outcome: Completed) -> None:
    assert bool(outcome.calls) == (outcome.stop_reason == "tool_use")
    ids = [call.provider_call_id for call in outcome.calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    for block in outcome.blocks:
        if isinstance(block, (TextBlock, ReasoningBlock)):
            assert block.text.strip()
            assert "\x00" not in block.text
        else:
            assert block.name
    if outcome.replay is not None:
        assert unpack(outcome.replay, 1, calls=len(ids)).call_ids == tuple(ids)
    msgspec.json.encode(outcome.usage)


@pytest.mark.parametrize("name", WIRES)
def test_the_stream_without_anything_wrong_is_an_answer(name: str) -> None:
    wire, events = WIRES[name]
    outcome = attempt(wire, b"".join(b"data: " + _data(event) + b"\n\n" for event in events()), [])
    assert isinstance(outcome, Completed)
    assert outcome.stop_reason == "tool_use"
    check_sound(outcome)
