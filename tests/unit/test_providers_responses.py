"""OpenAI Responses: odd streams, what of an answer goes back, what a request asks for."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.domain.content import MediaRefBlock, ReasoningBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.stream import TextDelta, ThinkingDelta, ToolArgumentsDelta
from omnara.providers import ApiKey, Completed, Failed, ModelCall, ModelGateway, ModelTarget, RenderedHistory
from omnara.providers.media import ModelFile
from omnara.providers.openai_responses import OpenAIResponses
from omnara.providers.replay import unpack
from omnara.testing import (
    Answer,
    Call,
    ModelServer,
    ModelSpec,
    StreamError,
    Strictness,
    Text,
    Thinking,
    plan,
    say,
    strict_responses,
)
from omnara.testing.signatures import Signer
from omnara.testing.strict import Context
from tests.support.agent_log import Driver, Log, call_block, new_call_id
from tests.support.canned_stream import Canned, canned

RESPONSES = "openai_responses"


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[Canned]:
    async with canned() as endpoint:
        yield endpoint


def target(url: str, **more: Any) -> ModelTarget:
    fields: dict[str, Any] = {"slug": "m", "supports_reasoning": True, **more}
    return ModelTarget(
        revision_id="r", provider="p", api_format=RESPONSES, base_url=url, api_key=ApiKey("key-of-x"), **fields
    )


def begin(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def end(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": {"type": kind, **fields}}


def delta(kind: str, index: int, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": index, "delta": text, **fields}


def message(index: int, *texts: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return end(index, "message", role="assistant", content=parts, **fields)


def call(index: int, call_id: Any, name: Any = "look", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return end(index, "function_call", call_id=call_id, name=name, arguments=arguments, **fields)


def thought(index: int, name: str = "rs_1", **fields: Any) -> dict[str, Any]:
    return end(index, "reasoning", id=name, **{"summary": [], "encrypted_content": "sealed", **fields})


def finished(status: str = "completed", **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{status}", "response": {"status": status, **fields}}


async def answer(gateway: ModelGateway, endpoint: Canned, *events: object) -> tuple[Any, Driver]:
    endpoint.say(*events)
    driver = Driver(gateway, target(endpoint.url))
    driver.log.user("go")
    return await driver.attempt(), driver


async def sent_back(gateway: ModelGateway, endpoint: Canned, *events: object) -> list[Any]:
    """The items of the request that follows this answer, after the first message."""
    outcome, driver = await answer(gateway, endpoint, *events)
    assert isinstance(outcome, Completed), outcome
    for made in outcome.calls:
        driver.log.result(made.public_id, TextBlock("ok"))
    driver.log.user("on")
    await driver.attempt()
    items: list[Any] = json.loads(endpoint.requests[-1][1])["input"]
    assert [item["type"] for item in items[:1] + items[-1:]] == ["message", "message"]
    return items[1:-1]


# --- streams --------------------------------------------------------------------------------------------------


async def test_the_last_event_of_an_item_counts_whatever_its_deltas_said(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    outcome, driver = await answer(
        gateway,
        endpoint,
        begin(0, "message", id="msg_1"),
        delta("output_text", 0, "hal"),
        message(0, "half and half"),
        begin(1, "function_call", call_id="c", name="look"),
        delta("function_call_arguments", 1, '{"n":'),
        call(1, "c", arguments='{"n":2}'),
        finished(),
    )
    assert outcome.blocks[0] == TextBlock("half and half")
    assert [made.input for made in outcome.calls] == [{"n": 2}]
    assert [d.delta for d in driver.deltas if isinstance(d, (TextDelta, ToolArgumentsDelta))] == ["hal", '{"n":']


async def test_an_end_that_repeats_nothing_takes_nothing_away(gateway: ModelGateway, endpoint: Canned) -> None:
    outcome, _ = await answer(
        gateway,
        endpoint,
        begin(0, "message"),
        delta("output_text", 0, "hi"),
        end(0, "message", role="assistant", content=[]),
        begin(1, "function_call", call_id="c", name="look"),
        delta("function_call_arguments", 1, '{"n":1}'),
        call(1, "c", arguments=""),
        finished(),
    )
    assert outcome.blocks[0] == TextBlock("hi")
    assert outcome.calls[0].input == {"n": 1}


async def test_items_without_ends_beginnings_or_any_events_of_their_own(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    deltas, _ = await answer(gateway, endpoint, delta("output_text", 0, "h"), delta("output_text", 0, "i"), finished())
    ends, _ = await answer(gateway, endpoint, message(0, "hi"), finished())
    whole, driver = await answer(gateway, endpoint, finished(output=[message(0, "hi")["item"]]))
    assert deltas.blocks == ends.blocks == whole.blocks == (TextBlock("hi"),)
    assert [d.delta for d in driver.deltas if isinstance(d, TextDelta)] == ["hi"]
    late, _ = await answer(
        gateway,
        endpoint,
        delta("function_call_arguments", 0, '{"n":'),
        delta("function_call_arguments", 0, "1}"),
        call(0, "c", arguments=None),
        finished(),
    )
    assert [(made.name, made.input) for made in late.calls] == [("look", {"n": 1})]


async def test_parts_of_reasoning_are_one_block(gateway: ModelGateway, endpoint: Canned) -> None:
    summary = [{"type": "summary_text", "text": text} for text in ("one", "two")]
    events = (
        begin(0, "reasoning", id="rs_1"),
        delta("reasoning_summary_text", 0, "one", summary_index=0),
        delta("reasoning_summary_text", 0, "tw", summary_index=1),
        delta("reasoning_summary_text", 0, "o", summary_index=1),
        thought(0, summary=summary),
        delta("reasoning_text", 1, "three"),
        end(1, "reasoning", content=[{"type": "reasoning_text", "text": "three"}]),
        message(2, "so"),
        finished(),
    )
    outcome, driver = await answer(gateway, endpoint, *events)
    assert outcome.blocks == (ReasoningBlock("one\n\ntwo"), ReasoningBlock("three"), TextBlock("so"))
    assert "".join(d.delta for d in driver.deltas if isinstance(d, ThinkingDelta)) == "one\n\ntwothree"


async def test_events_items_and_parts_that_are_not_known_are_skipped(gateway: ModelGateway, endpoint: Canned) -> None:
    outcome, _ = await answer(
        gateway,
        endpoint,
        {"type": "response.created"},
        {"type": "keepalive", "sequence_number": 7},
        {"type": "response.brand_new.delta", "output_index": "x", "delta": {}},
        begin(0, "web_search_call", id="ws_1", content={"odd": 1}),
        end(0, "web_search_call", id="ws_1", arguments=7),
        end(1, "message", role="assistant", content=[{"type": "poem"}, 7, {"type": "output_text", "text": "hi"}]),
        finished(),
    )
    assert outcome.blocks == (TextBlock("hi"),)
    assert outcome.replay is None


@pytest.mark.parametrize(
    "events",
    [
        [begin(0, "message"), begin(0, "message")],
        [begin(0, "message"), delta("function_call_arguments", 0, "{}")],
        [call(0, "c", id="fc_1"), call(0, "c", id="fc_1")],
        [call(0, "c"), call(1, "c")],
        [{"type": "response.output_text.delta", "delta": "x"}],
        [{"type": "response.output_item.done", "output_index": 0}],
        [{"type": "response.completed"}],
        [b"{"],
        [message(0, "hi")],
    ],
)
async def test_a_stream_that_contradicts_itself_or_stops_is_tried_again(
    gateway: ModelGateway, endpoint: Canned, events: list[Any]
) -> None:
    complete = events == [message(0, "hi")]
    outcome, _ = await answer(gateway, endpoint, *events, *(() if complete else (finished(),)))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == ("transient", True)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (finished("incomplete"), "unknown"),
        (finished("incomplete", incomplete_details={"reason": "steered"}), "unknown"),
        ({"type": "response.completed", "response": {"status": "incomplete"}}, "unknown"),
        (finished("incomplete", incomplete_details={"reason": "max_output_tokens"}), "max_tokens"),
        (finished("incomplete", incomplete_details={"reason": "content_filter"}), "content_filter"),
        (finished(), "end_turn"),
    ],
)
async def test_how_an_answer_ends(gateway: ModelGateway, endpoint: Canned, event: Any, kind: str) -> None:
    outcome, _ = await answer(gateway, endpoint, message(0, "hi"), event)
    assert (outcome.kind if isinstance(outcome, Failed) else outcome.stop_reason) == kind


async def test_calls_of_an_answer_that_was_cut_are_dropped(gateway: ModelGateway, endpoint: Canned) -> None:
    """Source: field-reports B43."""
    cut = finished("incomplete", incomplete_details={"reason": "max_output_tokens"})
    begun = begin(1, "function_call", call_id="c", name="look")
    outcome, _ = await answer(
        gateway, endpoint, message(0, "hi"), begun, delta("function_call_arguments", 1, '{"n"'), cut
    )
    assert (outcome.blocks, outcome.replay) == ((TextBlock("hi"),), None)
    filtered = finished("incomplete", incomplete_details={"reason": "content_filter"})
    outcome, _ = await answer(gateway, endpoint, message(0, "hi"), call(1, "c"), filtered)
    assert (outcome.kind, outcome.provider_code) == ("unknown", "malformed_answer")


async def test_a_refusal_and_usage(gateway: ModelGateway, endpoint: Canned) -> None:
    usage = {
        "input_tokens": 10,
        "output_tokens": 4,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 2},
        "output_tokens_details": {"reasoning_tokens": 3},
    }
    part = {"type": "refusal", "refusal": "I will not."}
    ended = end(0, "message", role="assistant", content=[part])
    outcome, _ = await answer(gateway, endpoint, delta("refusal", 0, "I will "), ended, finished(usage=usage))
    assert (outcome.stop_reason, outcome.blocks) == ("refusal", (TextBlock("I will not."),))
    counts = outcome.usage
    assert (counts.input_tokens_total, counts.uncached_input_tokens, counts.output_tokens_total) == (10, 4, 4)
    assert (counts.reasoning_output_tokens, counts.cache_read_input_tokens) == (3, 6)
    assert counts.cache_write_input_tokens == 2


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (finished("failed", error={"code": "server_error", "message": "x"}), "provider_unavailable"),
        (finished("failed", error={"code": "rate_limit_exceeded", "message": "x"}), "rate_limit"),
        (finished("failed", error={"code": "context_length_exceeded", "message": "x"}), "context_window"),
        (finished("failed", error={"code": "invalid_prompt", "message": "x"}), "invalid_request"),
        (finished("failed", error=None), "unknown"),
        ({"type": "response.completed", "response": {"status": "failed", "error": {"code": "server_error"}}},
         "provider_unavailable"),
        ({"type": "error", "code": "insufficient_quota", "message": "x"}, "billing_account"),
        ({"type": "error", "error": {"type": "server_error", "message": "x"}}, "provider_unavailable"),
        ({"type": "error"}, "unknown"),
    ],
)  # fmt: skip
async def test_errors_inside_a_stream(gateway: ModelGateway, endpoint: Canned, event: Any, kind: str) -> None:
    outcome, _ = await answer(gateway, endpoint, begin(0, "message"), delta("output_text", 0, "hi"), event)
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == (kind, True)
    assert outcome.message


@pytest.mark.parametrize("failed", [False, True])
async def test_both_error_events_of_the_scripted_model(gateway: ModelGateway, failed: bool) -> None:
    async with ModelServer(plan(say("x"))) as server:
        server.faults.push(StreamError("mid_text", failed=failed))
        driver = Driver(gateway, target(server.url + "/v1", slug="scripted"))
        driver.log.user("go")
        outcome = await driver.attempt()
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == ("provider_unavailable", "Overloaded")


# --- what goes back -------------------------------------------------------------------------------------------


async def test_what_only_this_model_understands_goes_back(gateway: ModelGateway, endpoint: Canned) -> None:
    said = message(1, "wait", id="msg_1", phase="commentary")
    items = await sent_back(gateway, endpoint, thought(0), said, call(2, "c", id="fc_1"), finished())
    assert items[:3] == [thought(0)["item"], said["item"], call(2, "c", id="fc_1")["item"]]
    assert items[3] == {"type": "function_call_output", "call_id": "c", "output": "ok"}
    plain = await sent_back(gateway, endpoint, message(0, "hi", id="msg_1", status="completed"), finished())
    assert plain == [{"type": "message", "role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    "spoiler",
    [
        thought(0, encrypted_content=None),
        thought(0, name="odd"),
        thought(0, name="rs_" + "1" * 62),
        thought(0, summary=None),
        thought(0, encrypted_content="a\x00b"),
        b'{"type":"response.output_item.done","output_index":0,"item":{"type":"reasoning","id":"rs_1","summary":'
        b'[{"type":"summary_text","text":"\\ud83d"}],"encrypted_content":"sealed"}}',
        end(0, "program", id="prog_1"),
        begin(0, "reasoning", id="rs_1"),
    ],
)
async def test_one_item_that_cannot_go_back_makes_the_answer_neutral(
    gateway: ModelGateway, endpoint: Canned, spoiler: Any
) -> None:
    items = await sent_back(gateway, endpoint, spoiler, message(1, "so", id="msg_1"), call(2, "c"), finished())
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
    assert not any("id" in item for item in items)
    assert items[1]["call_id"] == items[2]["call_id"] == "c"


async def test_items_are_made_sendable_one_by_one(gateway: ModelGateway, endpoint: Canned) -> None:
    items = await sent_back(
        gateway,
        endpoint,
        thought(0),
        message(1, " ", id="msg_1"),
        call(2, "x" * 65, name="bad name!", arguments='{"n":', id="odd", status="completed"),
        begin(4, "function_call"),
        call(3, "c", arguments="", id="fc_3"),
        call(4, "c", arguments='{"a":"\\u0000"}', id="fc_" + "4" * 62),
        message(5, "a\x00b", id="msg_5"),
        thought(6, name="rs_6"),
        finished(),
    )
    assert [item.get("id") for item in items[:5]] == ["rs_1", None, "fc_3", None, "msg_5"]
    first, second, third = items[1:4]
    assert (first["name"], first["arguments"], first["status"]) == ("bad_name_", "{}", "completed")
    assert (second["call_id"], second["arguments"]) == ("c", "{}")
    assert third["arguments"] == '{"a":"\ufffd"}'
    assert len({first["call_id"], "c", third["call_id"]}) == 3
    assert len(first["call_id"]) <= 64
    assert items[4]["content"][0]["text"] == "a\ufffdb"
    assert [item["type"] for item in items[5:]] == ["function_call_output"] * 3


async def test_ids_of_items_that_return_are_not_sent_twice(gateway: ModelGateway, endpoint: Canned) -> None:
    driver = Driver(gateway, target(endpoint.url))
    driver.log.user("go")
    for number in range(2):
        endpoint.say(thought(0), call(1, f"c{number}", id=f"fc_{number}"), finished())
        outcome = await driver.attempt()
        assert isinstance(outcome, Completed)
        driver.log.result(outcome.calls[0].public_id, TextBlock("ok"))
    await driver.attempt()
    items = json.loads(endpoint.requests[-1][1])["input"]
    assert [item["type"] for item in items].count("reasoning") == 1
    asked = [item["call_id"] for item in items if item["type"] == "function_call"]
    assert asked == [item["call_id"] for item in items if item["type"] == "function_call_output"]
    twice, _ = await answer(gateway, endpoint, thought(0), call(1, "c", id="fc_1"), call(2, "d", id="fc_1"), finished())
    assert twice.kind == "transient"


async def test_an_answer_with_the_same_item_id_twice_goes_back_without_ids(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    two = (begin(0, "reasoning"), begin(1, "function_call", name="look"), begin(2, "function_call", name="look"))
    ends = (thought(0), call(1, "c", id="fc_1"), call(2, "d", id="fc_1"))
    items = await sent_back(gateway, endpoint, *two, *ends, finished())
    assert not any("id" in item for item in items)
    assert [item["call_id"] for item in items] == ["c", "d", "c", "d"]


@pytest.mark.parametrize("words", ["invalid_encrypted_content", "Items are not persisted when `store` is false"])
async def test_a_refused_replay_is_named(gateway: ModelGateway, endpoint: Canned, words: str) -> None:
    outcome, driver = await answer(gateway, endpoint, thought(0), message(1, "so"), finished())
    assert unpack(outcome.replay, 1, calls=0).item_ids == ("rs_1",)
    driver.log.user("on")
    endpoint.say({"type": "error", "code": "invalid_encrypted_content", "message": f"encrypted content: {words}"})
    assert (await driver.attempt()).kind == "replay_rejected"  # type: ignore[union-attr]
    await driver.attempt(suppress_replay=True)
    assert b"sealed" not in endpoint.requests[-1][1]


async def test_reasoning_that_its_provider_no_longer_reads_is_left_out_from_then_on(gateway: ModelGateway) -> None:
    """Another organization's key, for instance. Source: field-reports B02."""
    busy = Answer(blocks=(Thinking("hm"), Call("look", {})))
    async with ModelServer(plan(busy, busy, say("Done."))) as server:
        driver = Driver(gateway, target(server.url + "/v1", slug="scripted"))
        driver.log.user("go")
        first = await driver.attempt()
        assert isinstance(first, Completed)
        driver.log.result(first.calls[0].public_id, TextBlock("ok"))
        server.signer = type(server.signer)(b"another key")
        refused = await driver.attempt()
        assert isinstance(refused, Failed)
        assert (refused.kind, refused.status) == ("replay_rejected", 400)
        again = await driver.attempt(suppress_replay=True)
        assert isinstance(again, Completed), again
        driver.log.result(again.calls[0].public_id, TextBlock("ok"))
        assert isinstance(await driver.attempt(), Completed)  # the new reasoning goes back
        last = json.loads(server.log.entries[-1].raw or b"")["input"]
    assert [item["type"] for item in last if item.get("role") != "user"] == [
        "function_call", "function_call_output", "reasoning", "function_call", "function_call_output"
    ]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 50_000])
async def test_the_scripted_model_takes_its_reasoning_back_for_many_turns(gateway: ModelGateway, chunk: int) -> None:
    busy = Answer(blocks=(Thinking("Why?"), Text("Because."), Call("look", {"n": 1}), Call("look", {})))
    quiet = Answer(blocks=(Thinking("Enough."), Text("Done.")))
    async with ModelServer(plan(busy, busy, quiet, busy, quiet, say("x"))) as server:
        driver = Driver(gateway, target(server.url + "/v1", slug="scripted-reasoning", temperature=0.5))
        for _ in range(3):
            await driver.run("go" * chunk)
        assert [entry.status for entry in server.log.entries] == [200] * 6
        last = json.loads(server.log.entries[-1].raw or b"")
    kinds = [item["type"] for item in last["input"] if item["type"] == "reasoning" or item.get("role") == "assistant"]
    assert kinds == ["reasoning", "message"] * 5


# --- files ----------------------------------------------------------------------------------------------------

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(16) + b"IDAT")
PDF = base64.b64encode(b"%PDF-1.7 rest")
FILES = {
    file.artifact_id: file
    for file in (
        ModelFile(artifact_id="art_image", media_type="image/png", filename="a.png", size=3, data=PNG),
        ModelFile(artifact_id="art_pdf", media_type="application/pdf", size=3, data=PDF),
        ModelFile(artifact_id="art_text", media_type="text/plain", filename="t", size=2, data="é".encode()),
        ModelFile(artifact_id="art_large", media_type="image/png", size=9, note="It is too large."),
    )
}


def text(value: str) -> dict[str, str]:
    return {"type": "input_text", "text": value}


SHOWN = {
    "art_image": [
        text("[Attachment art_image: a.png, image/png, 3 bytes]"),
        {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{PNG.decode()}"},
    ],
    "art_pdf": [
        text("[Attachment art_pdf: application/pdf, 3 bytes]"),
        {"type": "input_file", "filename": "art_pdf", "file_data": f"data:application/pdf;base64,{PDF.decode()}"},
    ],
    "art_text": [text("[Attachment art_text: t, text/plain, 2 bytes]\né")],
    "art_large": [text("[Attachment art_large: image/png, 9 bytes] It is too large.")],
    "art_lost": [text("[Attachment art_lost] Its content is not shown.")],
}


@pytest.mark.parametrize("name", SHOWN)
def test_files_stand_where_they_were_said_or_found(name: str) -> None:
    log = Log()
    log.said(TextBlock("look"), MediaRefBlock(name), MediaRefBlock("art_image"))
    asking = call_block()
    log.output(asking)
    log.result(asking.tool_call_id, TextBlock("found"), MediaRefBlock(name))
    log.user("on")
    context = ContextState()
    context.extend(log.events)
    made = ModelCall(
        target=target(""), system="", tools=(), context=context, history=RenderedHistory(),
        new_call_id=new_call_id, media=FILES,
    )  # fmt: skip
    body = json.loads(OpenAIResponses().body(made))
    said, _, result, _ = body["input"]
    assert said["content"] == [text("look"), *SHOWN[name], *SHOWN["art_image"]]
    assert result["output"] == [text(f"found\n[Attachment {name}]"), *SHOWN[name]]
    body["model"] = "scripted"
    strict_responses.check(body, Context(strictness=Strictness(), spec=ModelSpec(), signer=Signer(), tokens=1))


# --- the official client's opinion ----------------------------------------------------------------------------


def official() -> Any:
    """Reads a request body as the official client's types have it. Raises ValidationError."""
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
    from pydantic import TypeAdapter

    known = frozenset(ResponseCreateParamsStreaming.__annotations__)
    for base in ResponseCreateParamsStreaming.__orig_bases__:  # type: ignore[attr-defined]
        known |= frozenset(base.__annotations__)
    adapter: Any = TypeAdapter(ResponseCreateParamsStreaming)

    def read(body: dict[str, Any]) -> None:
        assert body.keys() <= known
        adapter.validate_python(body)

    return read


async def test_requests_fit_the_types_of_the_official_client(gateway: ModelGateway) -> None:
    read = official()
    busy = Answer(blocks=(Thinking("Why?"), Text("Because."), Call("look", {"n": 1}), Call("look", {})))
    async with ModelServer(plan(busy, say("Done."), busy, say("More.")), strict=Strictness(models=None)) as server:
        driver = Driver(gateway, target(server.url + "/v1", slug="gpt-6-luna", cache_retention="long"))
        await driver.run("go")
        driver.log.config_change()
        driver.target = target(server.url + "/v1", slug="gpt-5.5", cache_retention="long", reasoning_effort="low")
        driver.log.error("no")
        await driver.run("on")
        sent = [json.loads(entry.raw or b"") for entry in server.log.entries]
    assert len(sent) == 4
    for body in sent:
        read(body)
    kinds = {item["type"] for item in sent[-1]["input"]}
    assert kinds == {"message", "reasoning", "function_call", "function_call_output"}
    del sent[-1]["input"][-1]["output"]
    with pytest.raises(ValueError, match="output"):
        read(sent[-1])


# --- what is asked for ----------------------------------------------------------------------------------------


async def asked(gateway: ModelGateway, endpoint: Canned, first: str = "go", **more: Any) -> dict[str, Any]:
    endpoint.say(message(0, "hi"), finished())
    driver = Driver(gateway, target(endpoint.url, **more))
    await driver.run(first)
    await driver.run("on")
    one, two = (json.loads(body) for _, body in endpoint.requests[-2:])
    assert one.get("prompt_cache_key") == two.get("prompt_cache_key")
    value: dict[str, Any] = two
    return value


async def test_nothing_is_stored_and_functions_are_not_strict(gateway: ModelGateway, endpoint: Canned) -> None:
    body = await asked(gateway, endpoint)
    assert (body["store"], body["stream"], body["include"]) == (False, True, ["reasoning.encrypted_content"])
    assert [(tool["type"], tool["strict"]) for tool in body["tools"]] == [("function", False)]
    assert (body["instructions"], "previous_response_id" in body) == ("Be brief.", False)


@pytest.mark.parametrize(
    ("fields", "effort", "temperature"),
    [
        ({"reasoning_effort": "high"}, "high", None),
        ({}, None, None),
        ({"reasoning_effort": "none"}, "none", 0.5),
        ({"supports_reasoning": False, "reasoning_effort": "high"}, None, 0.5),
    ],
)
async def test_models_that_reason_are_asked_for_no_temperature(
    gateway: ModelGateway, endpoint: Canned, fields: Any, effort: str | None, temperature: float | None
) -> None:
    body = await asked(gateway, endpoint, temperature=0.5, **fields)
    assert body.get("reasoning", {}).get("effort") == effort
    assert body.get("temperature") == temperature


@pytest.mark.parametrize(
    ("slug", "retention", "hints"),
    [
        ("gpt-5.4", "none", {}),
        ("gpt-5.4", "short", {}),
        ("gpt-5.4", "long", {"prompt_cache_retention": "24h"}),
        ("gpt-5-codex", "long", {"prompt_cache_retention": "24h"}),
        ("gpt-5-2025-08-07", "long", {"prompt_cache_retention": "24h"}),
        ("gpt-5.6-sol", "long", {"prompt_cache_options": {"ttl": "12h"}}),
        ("gpt-6.2-astra", "long", {"prompt_cache_options": {"ttl": "12h"}}),
        ("gpt-4o", "long", {}),
        ("local-model", "long", {}),
    ],
)
async def test_cache_hints(gateway: ModelGateway, endpoint: Canned, slug: str, retention: Any, hints: Any) -> None:
    body = await asked(gateway, endpoint, slug=slug, cache_retention=retention)
    given = {name: value for name, value in body.items() if name.startswith("prompt_cache_")}
    key = given.pop("prompt_cache_key", None)
    assert given == hints
    assert (key is None) == (retention == "none")
    if key is not None:
        other = await asked(gateway, endpoint, "another beginning", slug=slug)
        assert len(key) <= 64
        assert key != other["prompt_cache_key"]


async def test_options_pass_and_what_is_ours_stays(gateway: ModelGateway, endpoint: Canned) -> None:
    options = {"top_p": 0.5, "store": True, "input": "x", "truncation": "auto", "service_tier": "flex", "tools": []}
    body = await asked(gateway, endpoint, options=options, max_output_tokens=3)
    assert (body["top_p"], body["service_tier"], body["store"]) == (0.5, "flex", False)
    assert ("truncation" in body, body["max_output_tokens"], bool(body["tools"])) == (False, 16, True)
