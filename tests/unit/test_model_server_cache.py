"""Prompt caching in the usage: hints that hold their prefix pay off, and those that do not are seen."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from omnara.testing import ModelServer, fixed
from omnara.testing.prompt_cache import PromptCache
from tests.unit.test_model_server import ANTHROPIC, CHAT, RESPONSES, body_for, send

MARK = {"type": "ephemeral"}


def _anthropic(turns: int) -> dict[str, Any]:
    """A conversation of `turns` exchanges, marked at the system prompt and at its last block."""
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": [{"type": "text", "text": f"question {number} " * 20}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"answer {number}"}]})
    messages.append({"role": "user", "content": [{"type": "text", "text": "last " * 20, "cache_control": MARK}]})
    system = [{"type": "text", "text": "Be brief. " * 30, "cache_control": MARK}]
    return {"model": "scripted-small", "max_tokens": 100, "system": system, "messages": messages}


async def _usage(server: ModelServer, path: str, body: Any) -> Any:
    status, answer, text = await send(server, path, body)
    assert status == 200, text
    return answer["usage"]


async def test_a_growing_conversation_reads_what_it_wrote() -> None:
    async with ModelServer(fixed()) as server:
        seen = [await _usage(server, ANTHROPIC, _anthropic(1))]
        longer = _anthropic(1)
        longer["messages"][-1]["content"][0].pop("cache_control")
        longer["messages"] += [
            {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
            {"role": "user", "content": [{"type": "text", "text": "more " * 10, "cache_control": MARK}]},
        ]
        seen.append(await _usage(server, ANTHROPIC, longer))
        seen.append(await _usage(server, ANTHROPIC, longer))
    first, second, third = seen
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 100
    assert 0 < second["cache_creation_input_tokens"] < 40
    assert third["cache_read_input_tokens"] == (
        second["cache_read_input_tokens"] + second["cache_creation_input_tokens"]
    )
    assert third["cache_creation_input_tokens"] == 0


async def test_a_changed_beginning_loses_all_that_follows() -> None:
    async with ModelServer(fixed()) as server:
        await _usage(server, ANTHROPIC, _anthropic(1))
        changed = _anthropic(1)
        changed["messages"][0]["content"][0]["text"] += "!"
        system_only = await _usage(server, ANTHROPIC, changed)
        changed["system"][0]["text"] += "!"
        nothing = await _usage(server, ANTHROPIC, changed)
        other_model = {**_anthropic(1), "model": "scripted"}
        assert (await _usage(server, ANTHROPIC, other_model))["cache_read_input_tokens"] == 0
    assert 70 < system_only["cache_read_input_tokens"] < 100
    assert nothing["cache_read_input_tokens"] == 0


async def test_without_a_mark_or_below_the_minimum_nothing_is_cached() -> None:
    async with ModelServer(fixed()) as server:
        bare = _anthropic(1)
        bare["messages"][-1]["content"][0].pop("cache_control")
        bare["system"][0].pop("cache_control")
        short = body_for(ANTHROPIC, model="scripted-small", max_tokens=10)
        short["messages"][0]["content"] = [{"type": "text", "text": "hi", "cache_control": MARK}]
        for body in (bare, short):
            for _ in range(2):
                usage = await _usage(server, ANTHROPIC, body)
                assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_openai_caches_prefixes_by_itself(path: str) -> None:
    name, field = ("input", "input_tokens_details") if path == RESPONSES else ("messages", "prompt_tokens_details")
    body = body_for(path, text="words " * 100, model="scripted-small")
    longer = copy.deepcopy(body)
    longer[name].append({"role": "user", "content": "more"})
    async with ModelServer(fixed()) as server:
        usages = [await _usage(server, path, sent) for sent in (body, longer, longer)]
    cached = [usage[field]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert 100 < cached[1] < cached[2]


def test_the_cache_is_bounded() -> None:
    cache = PromptCache(limit=3)
    bodies = [{"model": "m", "messages": [{"role": "user", "content": f"text {number}"}]} for number in range(5)]
    for body in bodies:
        cache.visit("chat", body, 5)
    assert [cache.visit("chat", body, 5).read > 0 for body in (bodies[4], bodies[0])] == [True, False]
