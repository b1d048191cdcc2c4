"""Conversations that wander between models: each request is one that a strict provider takes, and says the same.

Answers are made by the scripted model in its own wire format and read by our reader, so signatures, encrypted reasoning
and ids are those that a provider would check.
Source: field-reports B01, B02, B04.
"""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnara.domain.content import TextBlock
from omnara.domain.context import ContextState
from omnara.domain.events import EventMeta
from omnara.providers import Completed, Failed, ModelCall, ModelTarget, RenderedHistory
from omnara.providers.anthropic_messages import AnthropicMessages
from omnara.providers.openai_chat import OpenAIChat
from omnara.providers.openai_responses import OpenAIResponses
from omnara.providers.output import OutputBuilder
from omnara.providers.replay import unpack
from omnara.providers.sse import SseParser
from omnara.testing import Answer, Call, Strictness, Text, Thinking
from omnara.testing.conversation import Parsed
from omnara.testing.fast import new_token
from omnara.testing.formats import RULES, Rules, accept
from omnara.testing.signatures import Signer
from omnara.testing.wire import Reply
from tests.support.agent_log import LOOK, Log, new_call_id, stored

WIRES: dict[str, tuple[Any, Rules]] = {
    "anthropic_messages": (AnthropicMessages(), RULES["/v1/messages"]),
    "openai_chat_completions": (OpenAIChat(), RULES["/v1/chat/completions"]),
    "openai_responses": (OpenAIResponses(), RULES["/v1/responses"]),
}
FORMATS = tuple(WIRES)
HEADERS = {"authorization": "Bearer k", "x-api-key": "k", "anthropic-version": "2023-06-01"}
SIGNER = Signer(secrets.token_bytes(8))


def target(api_format: str, slug: str = "scripted") -> ModelTarget:
    return ModelTarget(
        revision_id="r",
        provider=f"provider of {api_format}",
        api_format=api_format,
        slug=slug,
        supports_reasoning=True,
        reasoning_effort="low",
    )


class Wandering:
    """A log, and a slot that is kept while models come and go, as the engine keeps it."""

    def __init__(self) -> None:
        self.log = Log()
        self.log.config_change()
        self.context = ContextState()
        self.history = RenderedHistory()

    def body(self, to: ModelTarget, *, fresh: bool = False) -> bytes:
        """The request to this model, with the kept slot or as after a restart."""
        context, history = self.context, self.history
        if fresh:
            context, history = ContextState(), RenderedHistory()
        context.extend(self.log.events)
        call = ModelCall(
            target=to, system="Be brief.", tools=(LOOK,), context=context, history=history, new_call_id=new_call_id
        )
        body: bytes = WIRES[to.api_format][0].body(call)
        return body

    def seen(self, to: ModelTarget, *, fresh: bool = False) -> tuple[bytes, Parsed]:
        """The request, and what the strict server of its format reads in it. Raises Refused."""
        body = self.body(to, fresh=fresh)
        return body, accept(WIRES[to.api_format][1], body, HEADERS, Strictness(), SIGNER).parsed

    def answer(self, by: ModelTarget, answer: Answer) -> Completed | Failed:
        """Let this model answer, and keep the answer."""
        wire, rules = WIRES[by.api_format]
        reply = Reply(
            token=new_token(), model=by.slug, created=1, input_tokens=1, signer=SIGNER, encrypted_reasoning=True
        )
        assembler = wire.assembler(None, OutputBuilder(new_call_id, None))
        for frame in rules.wire.frames(answer, reply):
            for data in SseParser().feed(frame.data):
                assembler.event(data)
        outcome: Completed | Failed = assembler.finish("")
        if isinstance(outcome, Completed):
            meta = EventMeta(self.log.last, by.provider, by.api_format, by.slug, "r")
            self.log.output(*map(stored, outcome.blocks), stop=outcome.stop_reason, meta=meta, replay=outcome.replay)
        return outcome


TEXTS = st.sampled_from(["so", " ", "", "a\x00b", "é 😀\u2028", '"quoted" \\ back'])
IDS = st.sampled_from([None, None, None, "call:1", "x" * 70, "same"])
RAW = st.sampled_from([None, None, '{ "n" : 1 }', "", '{"n":', "[1]", '{"a":"\\u0000"}'])
BLOCKS = st.one_of(
    st.builds(Text, TEXTS),
    st.builds(Thinking, st.sampled_from(["hm", "é 😀", ""]), st.booleans()),
    st.builds(
        Call, st.sampled_from(["look", "bad name!", "find"]), st.just({"path": "é", "n": [1, 2.5]}), raw=RAW, id=IDS
    ),
)
ANSWERS = st.builds(lambda blocks: Answer(blocks=tuple(blocks)), st.lists(BLOCKS, max_size=5))
MODELS = st.builds(target, st.sampled_from(FORMATS), st.sampled_from(["scripted", "scripted-2"]))


def wander(data: st.DataObject, talk: Wandering) -> None:
    """One turn: something is said, a model answers, and what it asked for is answered in any order, or not at all."""
    talk.log.user(data.draw(st.sampled_from(["go", "on", " "])))
    if data.draw(st.booleans()):
        talk.log.config_change()
    model = data.draw(MODELS)
    talk.seen(model)
    outcome = talk.answer(model, data.draw(ANSWERS))
    if isinstance(outcome, Completed):
        for call in data.draw(st.permutations(outcome.calls)):
            if data.draw(st.integers(0, 4)):
                result = data.draw(st.sampled_from(["R", "", "é\n\n"]))
                talk.log.result(call.public_id, TextBlock(result), outcome=data.draw(OUTCOMES))


OUTCOMES: Any = st.sampled_from(["succeeded", "failed"])


def meaning(parsed: Parsed) -> list[tuple[Any, ...]]:
    """What a request says, without anything that is its provider's."""
    told: list[tuple[Any, ...]] = []
    for message in parsed.messages:
        numbers = {call.id: number for number, call in enumerate(told[-1][3] if told else ())}
        results = [(numbers[result.call_id], result.name, result.text) for result in message.results]
        text = "".join(message.text.split())  # formats differ in how they join texts
        told.append((message.role, text, results, message.calls))
    return [
        (role, text, results, [(call.name, call.arguments) for call in calls]) for role, text, results, calls in told
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_model_understands_what_any_other_said(data: st.DataObject) -> None:
    talk = Wandering()
    for _ in range(data.draw(st.integers(1, 5))):
        wander(data, talk)
    talk.log.user("last")
    told = []
    for api_format in FORMATS:
        for slug in ("scripted", "scripted-2"):
            body, parsed = talk.seen(target(api_format, slug))
            assert talk.body(target(api_format, slug), fresh=True) == body
            told.append(meaning(parsed))
    assert all(one == told[0] for one in told)


FULL = Answer(blocks=(Thinking("Why?"), Text("Because."), Call("look", raw='{ "path" : "a" }'), Call("look", {})))


@pytest.mark.parametrize("after", FORMATS)
@pytest.mark.parametrize("before", FORMATS)
def test_what_only_its_maker_understands_stays_with_its_maker(before: str, after: str) -> None:
    """All pairs, the same format under another model among them."""
    talk = Wandering()
    talk.log.user("go")
    one = target(before)
    outcome = talk.answer(one, FULL)
    assert isinstance(outcome, Completed)
    assert outcome.replay is not None
    for call in outcome.calls:
        talk.log.result(call.public_id, TextBlock(f"result of {call.public_id}"))
    exact = unpack(outcome.replay, 1, calls=2)
    assert exact.content
    body, parsed = talk.seen(target(after, "scripted-2"))
    for private in (*exact.call_ids, *exact.item_ids, "signature", 'encrypted_content":', "reasoning_content", "Why?"):
        assert private.encode() not in body
    assert [call.id for call in parsed.messages[1].calls] == [call.public_id for call in outcome.calls]
    assert [result.text for result in parsed.messages[2].results] == [f"result of {c.public_id}" for c in outcome.calls]
    assert parsed.messages[1].text == "Because."
    assert parsed.messages[1].thinking == 0
    # The one who said it gets it back in the bytes that came, also after a restart.
    for fresh in (False, True):
        back, _ = talk.seen(one, fresh=fresh)
        for block in exact.content:
            assert block in back


def test_reasoning_items_go_back_byte_for_byte() -> None:
    """Nothing of an item is decoded on its way back: not its spaces, not the order of its fields, not what is new."""
    talk = Wandering()
    talk.log.user("go")
    by = target("openai_responses")
    assembler = OpenAIResponses().assembler(None, OutputBuilder(new_call_id, None))  # type: ignore[arg-type]
    sealed = SIGNER.seal("scripted", "rs_1")
    items = [
        b'{"summary": [ ], "id":"rs_1","new":1.0, "type":"reasoning","encrypted_content":"' + sealed.encode() + b'"}',
        b'{"id":"fc_1","type":"function_call","arguments":"{ \\"n\\" : 1.0 }","call_id":"c","name":"look", "x":0}',
    ]
    for index, item in enumerate(items):
        head = b'{"type":"response.output_item.done","output_index":%d,"item":%b}' % (index, item)
        assembler.event(head)
    assembler.event(b'{"type":"response.completed","response":{"status":"completed"}}')
    outcome = assembler.finish("")
    assert isinstance(outcome, Completed)
    meta = EventMeta(talk.log.last, by.provider, by.api_format, by.slug, "r")
    talk.log.output(*map(stored, outcome.blocks), meta=meta, replay=outcome.replay)
    talk.log.result(outcome.calls[0].public_id, TextBlock("ok"))
    body, _ = talk.seen(by)
    assert b",".join(items) in body
