"""What an answer is: imitators' oddities, arguments, replay, the in-process model."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from omnara.domain.content import ReasoningBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.events import EventMeta
from omnara.domain.stream import BlockStart, MessageStop, ModelUsage, TextDelta, ToolArgumentsDelta
from omnara.providers import (
    ApiKey,
    Completed,
    DamagedReplay,
    Failed,
    InProcessAdapter,
    ModelCall,
    ModelGateway,
    ModelTarget,
    RenderedHistory,
    ask,
    say,
)
from omnara.providers.arguments import MAX_CHARS, read_arguments
from omnara.providers.json_events import BadEvent
from omnara.providers.names import sent_name
from omnara.providers.openai_responses_wire import decoder as responses_events
from omnara.providers.output import MAX_ARGUMENTS, MAX_BLOCKS, MAX_CALLS
from omnara.providers.replay import Replay, pack, unpack
from omnara.providers.usage import MAX_COUNT, token_count, total_count
from tests.support.agent_log import Driver, call_block, new_call_id
from tests.support.canned_stream import Canned, canned, chunks

ANTHROPIC, CHAT, RESPONSES = "anthropic_messages", "openai_chat_completions", "openai_responses"


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[Canned]:
    async with canned() as endpoint:
        yield endpoint


def target(endpoint: Canned, api_format: str = CHAT) -> ModelTarget:
    return ModelTarget(
        revision_id="r",
        provider="p",
        slug="m",
        api_format=api_format,
        base_url=endpoint.url,
        api_key=ApiKey("key-of-x"),
    )


async def answer(gateway: ModelGateway, endpoint: Canned, *events: object, api_format: str = CHAT) -> Any:
    endpoint.say(*events)
    driver = Driver(gateway, target(endpoint, api_format))
    driver.log.user("go")
    return await driver.attempt()


def part(index: int | None, id: str | None = None, name: str | None = None, arguments: str | None = None) -> Any:
    made = {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [{key: value for key, value in made.items() if value is not None}]}


def wanted(outcome: Completed) -> list[tuple[str, str, dict[str, Any]]]:
    return [(call.provider_call_id, call.name, call.input) for call in outcome.calls]


async def test_calls_with_gaps_in_their_index_and_a_reason_that_says_stop(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    deltas = (
        part(0, "a", "look", '{"n":'),
        part(3, "b", "find", ""),
        part(0, None, None, "1}"),
        part(3, None, None, '{"n":2}'),
        {"content": None},
    )
    outcome = await answer(gateway, endpoint, *chunks(*deltas, finish="stop"))
    assert outcome.stop_reason == "tool_use"
    assert wanted(outcome) == [("a", "look", {"n": 1}), ("b", "find", {"n": 2})]


async def test_calls_that_all_claim_index_zero_or_none(gateway: ModelGateway, endpoint: Canned) -> None:
    same = (part(0, "a", "look", "{}"), part(0, "b", "find", '{"n":2}'))
    outcome = await answer(gateway, endpoint, *chunks(*same, finish="tool_calls"))
    assert wanted(outcome) == [("a", "look", {}), ("b", "find", {"n": 2})]
    absent = (part(None, "a", "look", "{}"), part(None, "b", "find", '{"n"'), part(None, None, None, ":2}"))
    outcome = await answer(gateway, endpoint, *chunks(*absent, finish="tool_calls"))
    assert wanted(outcome) == [("a", "look", {}), ("b", "find", {"n": 2})]


async def test_ids_that_are_missing_or_equal_are_replaced_and_a_late_name_is_waited_for(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    deltas = (part(0, "", "look", "{}"), part(1, "x", None, '{"n":'), part(1, "x", "find", "1}"), part(2, "x", "look"))
    outcome = await answer(gateway, endpoint, *chunks(*deltas, finish="tool_calls"))
    first, second, third = outcome.calls
    assert first.provider_call_id == first.public_id
    assert third.provider_call_id == third.public_id
    assert (second.name, second.provider_call_id, second.input) == ("find", "x", {"n": 1})


@pytest.mark.parametrize(
    ("deltas", "finish"),
    [
        ([{"content": "x"}], "tool_calls"),
        ([{"content": "x"}], "some_new_reason"),
        ([part(0, "a", "look", "{}")], "content_filter"),
        ([part(0, "a" * 2001, "look", "{}")], "tool_calls"),
        ([part(0, "a", "x" * 300, "{}")], "tool_calls"),
        ([part(0, "a", None, "{}")], "tool_calls"),
        ([{"content": "x"}], None),
    ],
)
async def test_a_success_that_makes_no_sense_is_tried_again(
    gateway: ModelGateway, endpoint: Canned, deltas: Any, finish: str | None
) -> None:
    outcome = await answer(gateway, endpoint, *chunks(*deltas, finish=finish))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.provider_code) == ("unknown", "malformed_answer")


async def test_content_in_parts_and_arguments_that_are_already_decoded(gateway: ModelGateway, endpoint: Canned) -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, 7]}
    parts = {"content": [thought, {"type": "text", "text": "so"}, {"type": "reference", "ids": [1]}, 7]}
    whole = {"tool_calls": [{"id": "a", "function": {"name": "look", "arguments": {"n": 1}}}]}
    events = [{"choices": [{"index": None, "delta": delta}]} for delta in (parts, whole)]
    outcome = await answer(gateway, endpoint, *events, *chunks(finish="tool_calls"))
    assert outcome.blocks[:2] == (ReasoningBlock("hm"), TextBlock("so"))
    assert wanted(outcome) == [("a", "look", {"n": 1})]


async def test_a_refusal_reasoning_and_usage(gateway: ModelGateway, endpoint: Canned) -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    deltas = ({"reasoning": "hm"}, {"refusal": "I will "}, {"refusal": "not."})
    outcome = await answer(gateway, endpoint, *chunks(*deltas, usage=usage))
    assert outcome.stop_reason == "refusal"
    assert outcome.blocks == (ReasoningBlock("hm"), TextBlock("I will not."))
    assert outcome.usage == ModelUsage(10, 4, 4, 3, 6, None)


async def test_an_answer_without_an_end_marker_is_whole_when_its_reason_came(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    events = list(chunks({"content": "hi"}))
    assert (await answer(gateway, endpoint, *events[:-1])).blocks == (TextBlock("hi"),)
    assert (await answer(gateway, endpoint, *events[:-2])).kind == "transient"


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        ({"code": 429, "message": "slow down"}, "rate_limit", 429),
        ({"code": 502, "message": "maximum context length exceeded"}, "context_window", 502),
        ({"code": "context_length_exceeded", "message": "x"}, "context_window", None),
        ({"type": "invalid_request_error", "message": "x"}, "invalid_request", None),
        ("something", "unknown", None),
        (7, "unknown", None),
    ],
)
async def test_errors_in_place_of_choices(
    gateway: ModelGateway, endpoint: Canned, error: Any, kind: str, status: int | None
) -> None:
    outcome = await answer(gateway, endpoint, {"error": error})
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.status, outcome.ambiguous) == (kind, status, True)


async def test_signed_calls_go_back_whole(gateway: ModelGateway, endpoint: Canned) -> None:
    signed = part(0, "a", "look", "{}")
    signed["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": "abc"}}
    endpoint.say(*chunks(signed, finish="tool_calls"))
    driver = Driver(gateway, target(endpoint))
    driver.log.user("go")
    first = await driver.attempt()
    assert isinstance(first, Completed)
    driver.log.result(first.calls[0].public_id, TextBlock("ok"))
    endpoint.say(*chunks({"content": "hi"}))
    await driver.attempt()
    sent = json.loads(endpoint.requests[-1][1])["messages"]
    assert sent[2]["tool_calls"][0]["extra_content"] == {"google": {"thought_signature": "abc"}}
    assert sent[3] == {"role": "tool", "tool_call_id": "a", "content": "ok"}


async def test_ids_that_return_in_a_later_answer_are_not_sent_twice(gateway: ModelGateway, endpoint: Canned) -> None:
    driver = Driver(gateway, target(endpoint))
    driver.log.user("go")
    for _ in range(2):
        endpoint.say(*chunks(part(0, "call_0", "look", "{}"), finish="tool_calls"))
        outcome = await driver.attempt()
        assert isinstance(outcome, Completed)
        driver.log.result(outcome.calls[0].public_id, TextBlock("ok"))
    await driver.attempt()
    sent = json.loads(endpoint.requests[-1][1])["messages"]
    asked = [message["tool_calls"][0]["id"] for message in sent if message.get("tool_calls")]
    answered = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert asked == answered
    assert len(set(asked)) == 2


def block(index: int, kind: str, *deltas: dict[str, Any], **start: Any) -> list[Any]:
    return [
        {"type": "content_block_start", "index": index, "content_block": {"type": kind, **start}},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def message(*blocks: list[Any], stop: str = "end_turn") -> list[Any]:
    events = [event for items in blocks for event in items]
    ending = {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 5}}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}
    return [start, {"type": "ping"}, {"type": "brand_new", "x": 1}, *events, ending, {"type": "message_stop"}]


async def test_blocks_and_deltas_that_are_not_known_are_skipped(gateway: ModelGateway, endpoint: Canned) -> None:
    text = block(1, "text", {"type": "text_delta", "text": "hi"}, {"type": "citations_delta", "citation": {}}, text="")
    outcome = await answer(
        gateway, endpoint, *message(block(0, "server_tool_use", id="x", name="y"), text), api_format=ANTHROPIC
    )
    assert outcome.blocks == (TextBlock("hi"),)
    assert (outcome.usage.input_tokens_total, outcome.usage.output_tokens_total) == (3, 5)


async def test_an_input_given_whole_at_the_start_counts(gateway: ModelGateway, endpoint: Canned) -> None:
    call = block(0, "tool_use", id="x", name="look", input={"n": 1})
    outcome = await answer(gateway, endpoint, *message(call, stop="tool_use"), api_format=ANTHROPIC)
    assert wanted(outcome) == [("x", "look", {"n": 1})]


@pytest.mark.parametrize("thought", ["unsigned", "half a character"])
async def test_reasoning_that_cannot_be_verified_again_is_not_kept(
    gateway: ModelGateway, endpoint: Canned, thought: str
) -> None:
    """Source: field-reports B02."""
    start = b'{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"x","signature":"'
    sign = b'{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"\\ud83d"}}'
    events = message(block(1, "tool_use", id="x", name="look"), stop="tool_use")
    signature = b"" if thought == "unsigned" else b"abc"
    odd = [start + signature + b'"}}', sign if signature else {"type": "ping"}]
    outcome = await answer(gateway, endpoint, *events[:3], *odd, *events[3:], api_format=ANTHROPIC)
    assert isinstance(outcome, Completed)
    assert outcome.replay is not None
    assert unpack(outcome.replay, 1, calls=1) == Replay(ANTHROPIC, ("x",))


@pytest.mark.parametrize(
    ("stop", "kind"), [("pause_turn", "invalid_request"), ("model_context_window_exceeded", "context_window")]
)
async def test_stops_that_are_no_answers(gateway: ModelGateway, endpoint: Canned, stop: str, kind: str) -> None:
    text = block(0, "text", {"type": "text_delta", "text": "hi"}, text="")
    outcome = await answer(gateway, endpoint, *message(text, stop=stop), api_format=ANTHROPIC)
    assert isinstance(outcome, Failed)
    assert outcome.kind == kind


@pytest.mark.parametrize("index", [0, 7])
async def test_a_stream_that_contradicts_itself_is_no_answer(
    gateway: ModelGateway, endpoint: Canned, index: int
) -> None:
    twice = [*block(0, "text", text="a"), *block(0, "text", text="b")]
    orphan = [{"type": "content_block_delta", "index": 7, "delta": {"type": "text_delta", "text": "x"}}]
    outcome = await answer(gateway, endpoint, *message(twice if index == 0 else orphan), api_format=ANTHROPIC)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "transient"


def read_nested(depth: int) -> dict[str, Any]:
    """`{}` inside so many objects."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("text", "value", "problem"),
    [
        ("", {}, None),
        (" ", {}, None),
        ('{"a":"\\u0000"}', {"a": "\0"}, None),
        ('{"a":"\\ud83d\\ude00","b":"\\ud83d"}', {"a": "😀", "b": "\ud83d"}, None),
        ('{"a":"\ud83d"}', {"a": "\ud83d"}, None),
        ('{"a":"' + "[" * 500 + '"}', {"a": "[" * 500}, None),
        ("[1]", {}, "not a JSON object"),
        ('{"a":', {}, "not valid JSON"),
        ('{"a":NaN}', {}, "not valid JSON"),
        ('{"a":1e999}', {}, "not valid JSON"),
        ('{"a":"\\ud83d","b":1e999}', {}, "not valid JSON"),
        ('{"a":"\\ud83d","b":NaN}', {}, "not valid JSON"),
        ("{'a':1}", {}, "not valid JSON"),
        ('{"a":' * 200 + "1" + "}" * 200, {}, "nested more than 128 levels"),
        ("[" * 20_000 + "]" * 20_000, {}, "nested more than 128 levels"),
        ('{"a":' * 127 + "{}" + "}" * 127, read_nested(127), None),
        ('{"a":' * 128 + "{}" + "}" * 128, {}, "nested more than 128 levels"),
        ('{"a":[' + '"]",' * 200 + "[[]]]}", {"a": [*["]"] * 200, [[]]]}, None),
        ('{"a":"\\"[\\\\","b":[' + "[]," * 200 + "1]}", {"a": '"[\\', "b": [*[[]] * 200, 1]}, None),
        ("[" * 20_000, {}, "not valid JSON"),
        ('{"a":"' + "x" * MAX_CHARS + '"}', {}, "longer than 4194304 characters"),
    ],
)
def test_arguments(text: str, value: dict[str, Any], problem: str | None) -> None:
    read, wrong = read_arguments(text)
    assert read == value
    assert (wrong is None) if problem is None else (wrong is not None and problem in wrong)


@pytest.mark.parametrize("end", ["", "\\", "]", '"]}'])
def test_a_string_of_quotes_that_never_ends_is_read_in_linear_time(end: str) -> None:
    """Where each quote began another search for its partner, these took minutes, with the whole process waiting."""
    text = '{"a":[' + "[]," * 200 + '"' + '\\"' * 200_000 + end
    started = time.thread_time()
    read_arguments(text)
    assert time.thread_time() - started < 2


@pytest.mark.parametrize("given", ["call:1", "a b", "ü", "functions.look:0", "x\n"])
@pytest.mark.parametrize("signed", [False, True])
async def test_an_id_that_strict_endpoints_refuse_is_replaced(
    gateway: ModelGateway, endpoint: Canned, given: str, signed: bool
) -> None:
    thought = block(0, "thinking", thinking="hm", signature="abc") if signed else []
    call = block(1, "tool_use", id=given, name="look at", input={"n": 1})
    outcome = await answer(gateway, endpoint, *message(thought, call, stop="tool_use"), api_format=ANTHROPIC)
    assert isinstance(outcome, Completed)
    assert outcome.replay is not None
    [requested] = outcome.calls
    kept = unpack(outcome.replay, 1, calls=1)
    assert kept.call_ids == (requested.provider_call_id,) == (requested.public_id,)
    if signed:
        used = json.loads(kept.content[-1])
        assert (used["id"], used["name"]) == (requested.public_id, "look_at")


async def test_reasoning_before_a_blank_text_does_not_end_a_message(gateway: ModelGateway, endpoint: Canned) -> None:
    """Source: field-reports B02, B04."""
    said = block(0, "text", text="so")
    thought = block(1, "thinking", thinking="hm", signature="abc")
    blank = block(2, "text", text=" ")
    outcome = await answer(gateway, endpoint, *message(said, thought, blank), api_format=ANTHROPIC)
    assert isinstance(outcome, Completed)
    assert outcome.replay is not None
    assert [json.loads(kept)["type"] for kept in unpack(outcome.replay, 1, calls=0).content] == ["text"]


async def test_such_ids_that_are_stored_are_not_sent(gateway: ModelGateway, endpoint: Canned) -> None:
    driver = Driver(gateway, target(endpoint, ANTHROPIC))
    driver.log.user("go")
    call = call_block()
    content = msgspec.json.encode({"type": "tool_use", "id": "call:1", "name": call.name, "input": {}})
    meta = EventMeta(2, "p", ANTHROPIC, "m", "r")
    driver.log.output(call, meta=meta, replay=pack(Replay(ANTHROPIC, ("call:1",), (content,))))
    driver.log.result(call.tool_call_id, TextBlock("ok"))
    endpoint.say(*message(block(0, "text", text="hi")))
    assert isinstance(await driver.attempt(), Completed)
    [(_, sent)] = endpoint.requests
    assert b"call:1" not in sent
    assert sent.count(call.tool_call_id.encode()) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "version", "calls"])
def test_a_damaged_replay_names_its_event(damage: str) -> None:
    blob = pack(Replay(ANTHROPIC, ("a",), (b'{"type":"thinking"}',)))
    assert unpack(blob, 7, calls=1).content == (b'{"type":"thinking"}',)
    broken = {
        "cut": blob[:-1],
        "flip": blob[:-2] + bytes([blob[-2] ^ 1]) + blob[-1:],
        "empty": b"",
        "version": b"OR9" + blob[3:],
        "calls": pack(Replay(ANTHROPIC, ("a", "b"))),
    }[damage]
    with pytest.raises(DamagedReplay) as caught:
        unpack(broken, 7, calls=1)
    assert caught.value.sequence == 7


async def test_a_damaged_replay_is_reported_before_anything_is_sent(gateway: ModelGateway, endpoint: Canned) -> None:
    driver = Driver(gateway, target(endpoint))
    driver.log.user("go")
    call = call_block()
    meta = EventMeta(2, "p", CHAT, "m", "r")
    driver.log.output(call, meta=meta, replay=b"OR1nonsense")
    driver.log.result(call.tool_call_id, TextBlock("ok"))
    for _ in range(2):
        with pytest.raises(DamagedReplay) as caught:
            await driver.attempt()
    assert caught.value.sequence == 3
    assert endpoint.requests == []
    endpoint.say(*chunks({"content": "hi"}))
    driver.context = ContextState(void=[(3, 4)])
    assert isinstance(await driver.attempt(), Completed)


@pytest.mark.parametrize(
    ("name", "sent"),
    [("look", "look"), ("a-b", "a-b"), ("bad name!", "bad_name_"), ("", "unknown_tool"), ("é" * 70, "_" * 64)],
)
def test_names_that_a_provider_would_refuse_are_made_sendable(name: str, sent: str) -> None:
    assert sent_name(name) == sent


async def test_the_in_process_model_is_a_function(gateway: ModelGateway) -> None:
    def script(call: ModelCall) -> Completed:
        asked = sum(len(message.calls) for message in call.context.settled if hasattr(message, "calls"))
        return ask(call, ("look", {"n": asked}), text="looking") if asked < 2 else say("done")

    gateway.register("in_process", InProcessAdapter(script))
    driver = Driver(gateway, ModelTarget(revision_id="r", provider="p", slug="m", api_format="in_process"))
    last = await driver.run("go")
    assert last.blocks == (TextBlock("done"),)
    kinds = [type(delta) for delta in driver.deltas]
    assert kinds.count(BlockStart) == 5
    assert (kinds.count(TextDelta), kinds.count(ToolArgumentsDelta), kinds.count(MessageStop)) == (3, 2, 3)
    assert driver.history.bytes_size == 0

    thoughtful = Completed("end_turn", (ReasoningBlock("hm"), TextBlock("so")))
    gateway.register("in_process", InProcessAdapter(lambda _: thoughtful))
    driver.deltas.clear()
    await driver.run("and?")
    assert [delta.block_index for delta in driver.deltas if isinstance(delta, BlockStart)] == [0, 1]

    async def slow(call: ModelCall) -> Failed:
        return Failed(kind="transient", message="away")

    gateway.register("in_process", InProcessAdapter(slow))
    call = ModelCall(
        target=driver.target,
        system="",
        tools=(),
        context=driver.context,
        history=RenderedHistory(),
        new_call_id=new_call_id,
    )
    assert await gateway.call(call) == Failed(kind="transient", message="away")


# --- answers without end --------------------------------------------------------------------------------------


def runaway(api_format: str, calls: int) -> list[Any]:
    """An answer that asks for so many calls."""
    if api_format == ANTHROPIC:
        blocks = (block(number, "tool_use", id=f"c{number}", name="look") for number in range(calls))
        return message(*blocks, stop="tool_use")
    if api_format == CHAT:
        return list(chunks(*(part(number, f"c{number}", "look", "{}") for number in range(calls)), finish="tool_calls"))
    item = {"type": "function_call", "name": "look", "arguments": "{}"}
    done = "response.output_item.done"
    return [
        *({"type": done, "output_index": n, "item": {**item, "call_id": f"c{n}"}} for n in range(calls)),
        {"type": "response.completed", "response": {"status": "completed"}},
    ]


@pytest.mark.parametrize("api_format", [ANTHROPIC, CHAT, RESPONSES])
async def test_a_model_that_never_stops_asking_is_tried_again(
    gateway: ModelGateway, endpoint: Canned, api_format: str
) -> None:
    outcome = await answer(gateway, endpoint, *runaway(api_format, MAX_CALLS), api_format=api_format)
    assert len(outcome.calls) == MAX_CALLS
    outcome = await answer(gateway, endpoint, *runaway(api_format, MAX_CALLS + 1), api_format=api_format)
    assert (outcome.kind, outcome.provider_code) == ("unknown", "malformed_answer")
    outcome = await answer(gateway, endpoint, *runaway(api_format, MAX_BLOCKS + 1), api_format=api_format)
    assert (outcome.kind, "more than 10000 blocks" in outcome.message) == ("transient", True)


async def test_calls_whose_names_never_come_are_bounded_too(gateway: ModelGateway, endpoint: Canned) -> None:
    nameless = (part(number, f"c{number}", None, "{}") for number in range(MAX_BLOCKS + 1))
    outcome = await answer(gateway, endpoint, *chunks(*nameless, finish="tool_calls"))
    assert outcome.kind == "transient"


async def test_a_million_nameless_calls_in_one_event_do_not_hold_up_the_process(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    """Each looked for its id among all before it: this one event took hours."""
    flood = {"tool_calls": [{"index": 0, "id": f"c{number}"} for number in range(300_000)]}
    started = time.thread_time()
    outcome = await answer(gateway, endpoint, *chunks(flood, finish="tool_calls"))
    assert time.thread_time() - started < 10
    assert (outcome.kind, "more than 10000 blocks" in outcome.message) == ("transient", True)


@pytest.mark.parametrize("api_format", [ANTHROPIC, RESPONSES])
async def test_blocks_of_unknown_kinds_are_bounded_too(
    gateway: ModelGateway, endpoint: Canned, api_format: str
) -> None:
    events: list[Any] = []
    for number in range(MAX_BLOCKS + 1):
        if api_format == ANTHROPIC:
            events.append({"type": "content_block_start", "index": number, "content_block": {"type": "new"}})
        else:
            events.append({"type": "response.output_item.added", "output_index": number, "item": {"type": "new"}})
    outcome = await answer(gateway, endpoint, *events, api_format=api_format)
    assert (outcome.kind, "more than 10000 blocks" in outcome.message) == ("transient", True)


@pytest.mark.parametrize("kind", ["new", "response.in_progress"])
def test_a_large_event_that_is_odd_is_not_read_leniently(kind: str) -> None:
    """Ten million empty lists took 800 MB and four seconds, in each event."""
    odd = "" if kind == "new" else "\\ud800"
    event = f'{{"x":[{"[]," * 2_000_000}1],"y":"{odd}","type":"{kind}"}}'.encode()
    tracemalloc.start()
    try:
        if kind == "new":
            assert responses_events.decode(event) is None
        else:
            with pytest.raises(BadEvent, match="large"):
                responses_events.decode(event)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    small = event.replace(b"[],", b"")
    assert (responses_events.decode(small) is None) == (kind == "new")


async def test_a_cut_answer_tells_no_more_calls_than_a_whole_one_may_have(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    parts = (part(number, f"c{number}", "look", "{}") for number in range(MAX_CALLS + 500))
    outcome = await answer(gateway, endpoint, *chunks(*parts, finish="length"))
    assert (outcome.stop_reason, len(outcome.calls)) == ("max_tokens", MAX_CALLS)


@pytest.mark.parametrize("finish", ["tool_calls", "length"])
async def test_arguments_that_are_too_long_together_are_tried_again(
    gateway: ModelGateway, endpoint: Canned, finish: str
) -> None:
    long = '{"a":"' + "x" * (MAX_ARGUMENTS // 3) + '"}'
    outcome = await answer(
        gateway, endpoint, *chunks(*(part(n, f"c{n}", "look", long) for n in range(3)), finish=finish)
    )
    assert (outcome.kind, outcome.provider_code) == ("unknown", "malformed_answer")


@pytest.mark.parametrize("depth", [100, 300, 800])
async def test_content_too_deep_for_a_later_reader_is_not_kept(
    gateway: ModelGateway, endpoint: Canned, depth: int
) -> None:
    """How deep a decoder goes depends on the stack below it: what the stream's took, a request's later refused."""
    [signed] = part(0, "c1", "look", "{}")["tool_calls"]
    events = chunks({"tool_calls": [{**signed, "extra_content": "deep"}]}, finish="tool_calls")
    deep = '{"a":' * depth + "{}" + "}" * depth
    texts = (event if isinstance(event, str) else json.dumps(event).replace('"deep"', deep) for event in events)
    outcome = await answer(gateway, endpoint, *texts)
    kept = unpack(outcome.replay, 1, calls=1)
    assert (kept.call_ids, bool(kept.content)) == (("c1",), depth < 192)


# --- counts that cannot be ------------------------------------------------------------------------------------

ABSURD = [99999999999999999999, 2**63 - 1, 2**53, 1.5, 1e300]


@pytest.mark.parametrize("count", ABSURD)
async def test_absurd_counts_are_left_out(gateway: ModelGateway, endpoint: Canned, count: float) -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": count, "cache_read_input_tokens": 7}}}
    text = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hi."}}
    ending = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": count}}
    events = (start, text, {"type": "content_block_stop", "index": 0}, ending, {"type": "message_stop"})
    outcome = await answer(gateway, endpoint, *events, api_format=ANTHROPIC)
    assert isinstance(outcome, Completed)
    assert outcome.usage == ModelUsage(7, None, None, None, 7, None)
    said = chunks({"content": "Hi."}, usage={"prompt_tokens": count, "completion_tokens": 3})
    outcome = await answer(gateway, endpoint, *said)
    assert isinstance(outcome, Completed)
    assert outcome.usage == ModelUsage(output_tokens_total=3)


def test_counts_at_the_bounds() -> None:
    assert (token_count(MAX_COUNT), token_count(-1), token_count(None)) == (MAX_COUNT, 0, None)
    assert (token_count(7.0), token_count(float("inf")), token_count(float("nan"))) == (7, None, None)
    assert total_count(MAX_COUNT, 1) is None
    assert (total_count(None, 1, 2), total_count(None), total_count(-5)) == (3, None, 0)
