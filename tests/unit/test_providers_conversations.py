"""Whole conversations with the strict model server, in each wire format: nothing that is sent is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio

from omnara.domain.content import EMPTY_RESULT_TEXT, ReasoningBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.domain.stream import (
    BlockStart,
    BlockStop,
    MessageStop,
    TextDelta,
    ThinkingDelta,
    ToolArgumentsDelta,
    ToolUseStreamBlock,
)
from omnara.providers import ApiKey, Completed, Failed, ModelGateway, ModelTarget, RenderedHistory
from omnara.testing import Answer, Call, ModelServer, Text, Thinking, Timing, Usage, plan, say
from tests.support.agent_log import Driver

ANTHROPIC, CHAT, RESPONSES = "anthropic_messages", "openai_chat_completions", "openai_responses"
FORMATS = (ANTHROPIC, CHAT, RESPONSES)
BUSY = Answer(
    blocks=(
        Thinking("First I look."),
        Text("I read é and 😀 now."),
        Call("look", {"path": "a.txt", "lines": [1, 2]}),
        Call("look", {}),
    ),
    usage=Usage(input=100, output=20, cache_read=40),
)


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


def target(server: ModelServer, api_format: str, **more: Any) -> ModelTarget:
    fields: dict[str, Any] = {
        "revision_id": "mrev_x",
        "provider": "scripted",
        "slug": "scripted",
        "api_key": ApiKey("secret-key"),
        "max_output_tokens": 4096,
    }
    return ModelTarget(api_format=api_format, base_url=server.url + "/v1", **{**fields, **more})


def bodies(server: ModelServer) -> list[bytes]:
    return [entry.raw or b"" for entry in server.log.entries]


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("api_format", FORMATS)
async def test_an_answer_is_read_the_same_however_it_is_cut(
    gateway: ModelGateway, api_format: str, chunk: int | None
) -> None:
    async with ModelServer(plan(BUSY, say("Done."))) as server:
        server.timing = Timing(chunk_bytes=chunk)
        driver = Driver(gateway, target(server, api_format))
        driver.log.user("go")
        outcome = await driver.attempt()
    assert isinstance(outcome, Completed)
    assert outcome.stop_reason == "tool_use"
    assert outcome.blocks[0] == ReasoningBlock("First I look.")
    assert outcome.blocks[1] == TextBlock("I read é and 😀 now.")
    first, second = outcome.calls
    assert (first.name, first.input, first.problem) == ("look", {"path": "a.txt", "lines": [1, 2]}, None)
    assert (second.input, second.problem) == ({}, None)
    usage = outcome.usage
    assert (usage.input_tokens_total, usage.output_tokens_total, usage.cache_read_input_tokens) == (
        (140, 20, 40) if api_format == ANTHROPIC else (usage.input_tokens_total, 20, 40)
    )
    assert outcome.request_id


@pytest.mark.parametrize("api_format", FORMATS)
async def test_deltas_tell_the_answer_block_by_block(gateway: ModelGateway, api_format: str) -> None:
    async with ModelServer(plan(BUSY)) as server:
        driver = Driver(gateway, target(server, api_format))
        driver.log.user("go")
        outcome = await driver.attempt()
    assert isinstance(outcome, Completed)
    deltas = driver.deltas
    starts = [delta for delta in deltas if isinstance(delta, BlockStart)]
    assert [start.block_index for start in starts] == [0, 1, 2, 3]
    assert [start.block for start in starts[2:]] == [
        ToolUseStreamBlock(call.public_id, call.name) for call in outcome.calls
    ]
    assert sorted(delta.block_index for delta in deltas if isinstance(delta, BlockStop)) == [0, 1, 2, 3]
    said = "".join(delta.delta for delta in deltas if isinstance(delta, TextDelta))
    thought = "".join(delta.delta for delta in deltas if isinstance(delta, ThinkingDelta))
    arguments = [delta for delta in deltas if isinstance(delta, ToolArgumentsDelta) and delta.block_index == 2]
    assert (said, thought) == ("I read é and 😀 now.", "First I look.")
    assert json.loads("".join(delta.delta for delta in arguments)) == {"path": "a.txt", "lines": [1, 2]}
    assert isinstance(deltas[-1], MessageStop)
    assert deltas[-1].stop.reason == "tool_use"


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_long_conversation_with_tools_is_never_refused_and_grows_by_prefix(
    gateway: ModelGateway, api_format: str
) -> None:
    """Source: DESIGN §9 and the rule that request n+1 starts with request n up to its cache mark."""
    async with ModelServer(plan(BUSY, say("One."), BUSY, BUSY, say("Two."), say("Three."))) as server:
        driver = Driver(gateway, target(server, api_format))
        assert (await driver.run("go")).blocks == (TextBlock("One."),)
        driver.log.config_change()
        driver.log.error("the provider was away")
        assert (await driver.run("go on", results="  ")).blocks == (TextBlock("Two."),)
        assert (await driver.run("and?")).blocks == (TextBlock("Three."),)
        assert [entry.status for entry in server.log.entries] == [200] * 6
        sent = bodies(server)
    for before, after in pairwise(sent):
        mark = before.rindex(b',"cache_control"') if api_format == ANTHROPIC else before.rindex(b'"}')
        assert len(after) > len(before)
        assert after.startswith(before[:mark])
    assert EMPTY_RESULT_TEXT.encode() in sent[-1]
    assert b"the provider was away" in sent[-1]


@pytest.mark.parametrize("api_format", FORMATS)
async def test_the_cache_slot_gives_the_same_bytes_as_a_fresh_one(gateway: ModelGateway, api_format: str) -> None:
    async with ModelServer(plan(BUSY, say("One."), say("Two."))) as server:
        driver = Driver(gateway, target(server, api_format))
        await driver.run("go")
        await driver.run("on")
        driver.log.user("again")
        await driver.attempt()
        driver.log.events.pop()
        driver.context, driver.history = ContextState(), RenderedHistory()
        await driver.attempt()
        with_slot, without = bodies(server)[-2:]
    assert with_slot == without
    assert 0 < driver.history.bytes_size < len(without)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_switch_between_formats_and_models_in_mid_batch_keeps_the_exchange(
    gateway: ModelGateway, api_format: str
) -> None:
    other = CHAT if api_format == ANTHROPIC else ANTHROPIC
    async with ModelServer(plan(BUSY, BUSY, say("Done."))) as server:
        driver = Driver(gateway, target(server, api_format))
        driver.log.user("go")
        first = await driver.attempt()
        assert isinstance(first, Completed)
        for call in first.calls:
            driver.log.result(call.public_id, TextBlock("seen by the first"))
        driver.target = target(server, other, slug="scripted-2")
        second = await driver.attempt()
        assert isinstance(second, Completed)
        for call in second.calls:
            driver.log.result(call.public_id, TextBlock("seen by the second"))
        driver.target = target(server, api_format, slug="scripted-2")
        assert isinstance(await driver.attempt(), Completed)
        last = bodies(server)[-1]
        assert [entry.status for entry in server.log.entries] == [200] * 3
    assert b"seen by the first" in last
    assert b"seen by the second" in last
    assert b"signature" not in last


@pytest.mark.parametrize("redacted", [False, True])
async def test_signed_reasoning_goes_back_unchanged_and_only_to_its_model(
    gateway: ModelGateway, redacted: bool
) -> None:
    """Source: field-reports B02."""
    thought = Answer(blocks=(Thinking("Ich denke … 😀\u2028", redacted), Text("so"), Call("look", {"path": "é"})))
    async with ModelServer(plan(thought, thought, say("Done."))) as server:
        driver = Driver(gateway, target(server, ANTHROPIC, supports_reasoning=True, reasoning_effort="low"))
        await driver.run("go")
        same = json.loads(bodies(server)[-1])["messages"]
        kinds = [[block["type"] for block in message["content"]] for message in same]
        kind = "redacted_thinking" if redacted else "thinking"
        assert kinds[1] == [kind, "text", "tool_use"]
        if not redacted:
            assert same[1]["content"][0]["thinking"] == "Ich denke … 😀\u2028"
        driver.target = target(server, ANTHROPIC, slug="scripted-2")
        driver.log.user("more")
        assert isinstance(await driver.attempt(), Completed)
        assert b"thinking" not in bodies(server)[-1]
        assert all(entry.status == 200 for entry in server.log.entries)


async def test_a_refused_replay_is_named_and_left_out_from_then_on(gateway: ModelGateway) -> None:
    """Source: field-reports B02: one retry without reasoning, never a dead agent."""
    thought = Answer(blocks=(Thinking("hm"), Call("look", {})))
    script = plan(thought, thought, say("Done."), say("More."))
    async with ModelServer(script) as server:
        driver = Driver(gateway, target(server, ANTHROPIC))
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
        assert isinstance(await driver.attempt(), Completed)  # the new, well-signed reasoning is replayed
        last = json.loads(bodies(server)[-1])["messages"]
    assert [block["type"] for block in last[1]["content"]] == ["tool_use"]
    assert [block["type"] for block in last[3]["content"]] == ["thinking", "tool_use"]


async def test_reasoning_with_a_budget_pauses_where_its_beginning_is_gone(gateway: ModelGateway) -> None:
    async with ModelServer(plan(BUSY, say("Done."), say("More.")), lenient=True) as server:
        plain = target(server, ANTHROPIC, slug="claude-sonnet-4-5")
        driver = Driver(gateway, plain)
        driver.log.user("go")
        first = await driver.attempt()
        assert isinstance(first, Completed)
        for call in first.calls:
            driver.log.result(call.public_id, TextBlock("ok"))
        driver.target = target(
            server,
            ANTHROPIC,
            slug="claude-opus-4-1",
            supports_reasoning=True,
            reasoning_effort="medium",
            max_output_tokens=8000,
            temperature=0.5,
        )
        await driver.attempt()
        driver.log.user("next")
        await driver.attempt()
        mid_batch, fresh = (json.loads(body) for body in bodies(server)[-2:])
    assert "thinking" not in mid_batch
    assert mid_batch["temperature"] == 0.5
    assert fresh["thinking"] == {"type": "enabled", "budget_tokens": 4000}
    assert "temperature" not in fresh


@pytest.mark.parametrize(
    ("retention", "mark"),
    [("none", None), ("short", {"type": "ephemeral"}), ("long", {"type": "ephemeral", "ttl": "1h"})],
)
async def test_cache_marks_stand_on_the_system_text_and_on_the_last_block(
    gateway: ModelGateway, retention: Any, mark: Any
) -> None:
    async with ModelServer(plan(BUSY, say("Done."))) as server:
        driver = Driver(gateway, target(server, ANTHROPIC, cache_retention=retention))
        await driver.run("go")
        body = json.loads(bodies(server)[-1])
        driver.system = "  "
        driver.log.user("on")
        await driver.attempt()
        unsaid = json.loads(bodies(server)[-1])
    marked = [block.get("cache_control") for message in body["messages"] for block in message["content"]]
    assert marked == [None] * (len(marked) - 1) + [mark]
    assert body["system"][0].get("cache_control") == mark
    assert "system" not in unsaid
    assert unsaid["tools"][-1].get("cache_control") == mark


async def test_chat_carries_reasoning_back_to_its_maker_beside_calls_only(gateway: ModelGateway) -> None:
    script = plan(BUSY, Answer(blocks=(Thinking("again"), Text("Done."))), say("More."))
    async with ModelServer(script) as server:
        driver = Driver(gateway, target(server, CHAT))
        await driver.run("go")
        await driver.run("on")
        messages = json.loads(bodies(server)[-1])["messages"]
    spoken = [message for message in messages if message["role"] == "assistant"]
    assert [message.get("reasoning_content") for message in spoken] == ["First I look.", None]


@pytest.mark.parametrize("api_format", FORMATS)
async def test_limits_options_and_effort_reach_the_provider(gateway: ModelGateway, api_format: str) -> None:
    async with ModelServer(plan(say("x"), say("y")), lenient=True) as server:
        options = {"top_p": 0.5, "model": "other", "messages": [], "stream": False}
        driver = Driver(gateway, target(server, api_format, temperature=0.2, options=options, supports_tools=False))
        await driver.run("go")
        driver.target = target(
            server,
            api_format,
            temperature=0.2,
            supports_reasoning=True,
            reasoning_effort="high",
            api_variant="openrouter",
        )
        await driver.run("on")
        plain, thoughtful = (json.loads(body) for body in bodies(server))
    assert (plain["top_p"], plain["model"], plain["stream"], plain["temperature"]) == (0.5, "scripted", True, 0.2)
    assert "tools" not in plain
    assert "temperature" not in thoughtful
    if api_format == ANTHROPIC:
        assert (thoughtful["thinking"], thoughtful["output_config"]) == ({"type": "adaptive"}, {"effort": "high"})
    elif api_format == RESPONSES:
        assert (plain["max_output_tokens"], thoughtful["reasoning"]) == (4096, {"effort": "high"})
        assert "include" not in plain, "models without reasoning refuse to be asked for it"
    else:
        assert (plain["max_completion_tokens"], thoughtful["max_tokens"]) == (4096, 4096)
        assert thoughtful["reasoning"] == {"effort": "high"}
