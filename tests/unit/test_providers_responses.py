"""OpenAI Responses: odd streams, and what of an answer goes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.domain.content import ReasoningBlock, TextBlock
from omnara.domain.stream import TextDelta, ThinkingDelta, ToolArgumentsDelta
from omnara.providers import Completed, Failed, ModelGateway
from omnara.providers.replay import unpack
from omnara.testing import (
    Answer,
    Call,
    ModelServer,
    StreamError,
    Text,
    Thinking,
    plan,
    say,
)
from tests.support.agent_log import Driver
from tests.support.canned_stream import Canned, canned
from tests.support.responses_stream import begin, call, delta, end, finished, message, target, thought


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[Canned]:
    async with canned() as endpoint:
        yield endpoint


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


async def test_calls_of_an_answer_that_was_cut_are_told_and_not_replayed(
    gateway: ModelGateway, endpoint: Canned
) -> None:
    """Source: field-reports B43."""
    cut = finished("incomplete", incomplete_details={"reason": "max_output_tokens"})
    begun = begin(1, "function_call", call_id="c", name="look")
    outcome, _ = await answer(
        gateway, endpoint, message(0, "hi"), begun, delta("function_call_arguments", 1, '{"n"'), cut
    )
    assert (outcome.stop_reason, outcome.replay) == ("max_tokens", None)
    text, called = outcome.blocks
    assert text == TextBlock("hi")
    assert called.problem is not None
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
