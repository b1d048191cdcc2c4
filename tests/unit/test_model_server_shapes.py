"""Every event and document is valid under the official clients' own types, and no request can crash the server."""

from __future__ import annotations

import copy
import json
import random
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from omnara.testing import Answer, Call, ModelServer, Stop, StreamError, Strictness, Text, Thinking
from omnara.testing.conversation import Conversation
from omnara.testing.formats import RULES, accept
from omnara.testing.prompt_cache import PromptCache
from omnara.testing.signatures import Signer
from omnara.testing.strict import Refused
from tests.unit.test_model_server import ANTHROPIC, BUSY, CHAT, KEYS, PATHS, RESPONSES, body_for, events, send
from tests.unit.test_model_server_strict import ANTHROPIC_OK, CHAT_OK, RESPONSES_OK

ANSWERS = (
    BUSY,
    Answer(),
    Answer(blocks=(Thinking("x", redacted=True), Text(""), Call("f", raw='{"a'))),
    Answer(blocks=(Thinking(""),)),
)


def _types(path: str) -> tuple[Any, Any]:
    """The official types of a document and of an event."""
    from pydantic import TypeAdapter

    if path == ANTHROPIC:
        from anthropic.types import Message, RawMessageStreamEvent

        return TypeAdapter(Message), TypeAdapter(RawMessageStreamEvent)
    if path == CHAT:
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        return TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)
    from openai.types.responses import Response, ResponseStreamEvent

    return TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stop", typing.get_args(Stop))
async def test_answers_fit_the_official_types(path: str, stop: Stop) -> None:
    whole, event_type = _types(path)
    more: dict[str, Any] = {"include": ["reasoning.encrypted_content"]} if path == RESPONSES else {}
    streamed = {**more, "stream": True}
    if path == CHAT:
        streamed["stream_options"] = {"include_usage": True}
    answer = Answer()

    def script(_: Conversation) -> Answer:
        return answer

    async with ModelServer(script) as server:
        for answer in (replace(answer, stop=stop) for answer in ANSWERS):  # noqa: B007 - the script reads it
            whole.validate_python((await send(server, path, body_for(path, **more)))[1])
            seen = events((await send(server, path, body_for(path, **streamed)))[2])
            for event in seen:
                if event.get("type") != "ping":
                    event_type.validate_python(event)
        server.faults.push(StreamError("mid_text", failed=True), StreamError("mid_text"))
        if path == RESPONSES:
            for _ in range(2):
                seen = events((await send(server, path, body_for(path, **streamed)))[2])
                assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
                for event in seen:
                    event_type.validate_python(event)


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, "", " ", "x", [], {}, [{}], [None], ["x"], {"type": "text"}, {"type": "tool_use"},
    {"type": "tool_result"}, {"type": "function_call"}, {"type": "reasoning"}, {"type": "thinking"}, {"type": []},
    {"type": {"a": 1}}, {"role": "tool"}, {"type": "enabled", "budget_tokens": 1024},
)  # fmt: skip


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from _places(item, (*place, key))


def _disturb(body: dict[str, Any], chance: random.Random) -> None:
    places = list(_places(body))
    if not places:
        return
    *way, last = chance.choice(places)
    place: Any = body
    for key in way:
        place = place[key]
    if chance.random() < 0.2:
        del place[last]
    else:
        place[last] = copy.deepcopy(chance.choice(ODD))


@pytest.mark.parametrize(
    ("path", "good"), [(ANTHROPIC, ANTHROPIC_OK), (CHAT, CHAT_OK), (RESPONSES, RESPONSES_OK)], ids=PATHS
)
def test_disturbed_requests_are_refused_or_read(path: str, good: dict[str, Any]) -> None:
    """Whatever the body, the rules decide; anything but a refusal or a readable conversation raises here."""
    chance = random.Random(path)
    refused = 0
    for _ in range(3000):
        body = {**copy.deepcopy(good), chance.choice(("thinking", "temperature", "include")): chance.choice(ODD)}
        for _ in range(chance.randint(0, 3)):
            _disturb(body, chance)
        try:
            conversation = accept(RULES[path], json.dumps(body).encode(), KEYS, Strictness(), Signer())
            assert isinstance(conversation.last_user_text, str)
        except Refused:
            refused += 1
            continue
        assert PromptCache().visit(conversation.format, body, 1).write >= 0
    assert 1500 < refused < 3000


async def test_a_bug_in_a_script_is_an_error_that_the_log_shows(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Conversation) -> Answer:
        raise KeyError("forgotten")

    async with ModelServer(broken) as server:
        status, _, _ = await send(server, CHAT, body_for(CHAT))
        assert status == 500
        assert (server.log.last.outcome, server.log.last.detail) == ("script_error", "KeyError('forgotten')")
        assert server.log.counts.script_errors == 1
    assert "forgotten" in caplog.text


async def test_a_server_comes_back_on_the_same_port() -> None:
    server = ModelServer()
    await server.start()
    url = server.url
    assert (await send(server, CHAT, body_for(CHAT)))[0] == 200
    await server.stop()
    async with server:
        assert server.url == url
        assert (await send(server, CHAT, body_for(CHAT)))[0] == 200
        assert server.log.counts.answered == 2
