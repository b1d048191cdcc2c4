"""The scripted model server as its official clients see it, and the requests that its other tests send."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from omnara.testing import Answer, Call, ModelServer, Stop, Text, Thinking, Timing, Usage, plan, say

ANTHROPIC, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
PATHS = (ANTHROPIC, CHAT, RESPONSES)
KEYS = {"x-api-key": "secret", "authorization": "Bearer secret", "anthropic-version": "2023-06-01"}

BUSY = Answer(
    blocks=(
        Thinking("First I look at the folder."),
        Text("I read é and 😀 now."),
        Call("read_file", {"path": "a.txt", "lines": [1, 2]}),
        Call("noop"),
    ),
    usage=Usage(input=11, output=7, cache_read=5),
)


def body_for(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    """A sound request with one user message."""
    body: dict[str, Any] = {"model": "scripted", **more}
    if path == RESPONSES:
        return {"input": [{"role": "user", "content": text}], **body}
    if path == ANTHROPIC:
        body.setdefault("max_tokens", 1000)
    return {"messages": [{"role": "user", "content": text}], **body}


async def send(
    server: ModelServer, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any, str]:
    """Post a body; return status, decoded JSON (or `None`) and the text."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=data, headers=KEYS if headers is None else headers) as response,
    ):
        text = await response.text()
        kind = response.content_type
        return response.status, json.loads(text) if kind == "application/json" else None, text


def events(text: str) -> list[Any]:
    """The decoded data of a stream's events, `[DONE]` left out."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_the_anthropic_client_reads_streams_and_documents() -> None:
    import anthropic

    async with ModelServer(plan(BUSY, say("Done: {{result 0}}"))) as server:
        client = anthropic.AsyncAnthropic(api_key="secret", base_url=server.url, max_retries=0)
        request: dict[str, Any] = {"model": "scripted", "max_tokens": 1000}
        opening = {"role": "user", "content": "go"}
        async with client.messages.stream(messages=[opening], **request) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(messages=[opening], **request)
        for message in (streamed, whole):
            thinking, text, call, noop = message.content
            assert (thinking.thinking, text.text) == ("First I look at the folder.", "I read é and 😀 now.")
            assert (call.name, call.input, noop.input) == ("read_file", {"path": "a.txt", "lines": [1, 2]}, {})
            assert message.stop_reason == "tool_use"
            assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
            assert message.usage.cache_read_input_tokens == 5
        replay = [block.model_dump(exclude_none=True) for block in streamed.content]
        for block in replay:
            block.pop("parsed_output", None)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"result of {block['name']}"}
            for block in replay
            if block["type"] == "tool_use"
        ]
        messages = [opening, {"role": "assistant", "content": replay}, {"role": "user", "content": results}]
        answer = await client.messages.create(messages=messages, **request)
        assert answer.content[0].text == "Done: result of read_file"
        assert (await client.models.list()).data[0].id == "scripted"
        await client.close()
        assert server.log.counts.answered == 3


async def test_the_openai_client_reads_chat_completions() -> None:
    import openai

    async with ModelServer(plan(BUSY)) as server:
        client = openai.AsyncOpenAI(api_key="secret", base_url=server.url + "/v1", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "go"}]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="scripted", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "I read é and 😀 now."
        arguments = ""
        for chunk in chunks:
            for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                arguments += call.function.arguments if call.index == 0 else ""
        assert json.loads(arguments) == {"path": "a.txt", "lines": [1, 2]}
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens == 16
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 5
        assert all(chunk.usage is None for chunk in chunks[:-1])
        whole = await client.chat.completions.create(model="scripted", messages=messages)
        assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["read_file", "noop"]
        assert whole.choices[0].message.content == text
        assert (await client.models.list()).data[0].id == "scripted"
        await client.close()


async def test_the_openai_client_reads_responses_and_replays_them() -> None:
    import openai

    async with ModelServer(plan(BUSY, say("Done: {{result 1}}"))) as server:
        client = openai.AsyncOpenAI(api_key="secret", base_url=server.url + "/v1", max_retries=0)
        request: dict[str, Any] = {"model": "scripted", "store": False, "include": ["reasoning.encrypted_content"]}
        opening: Any = {"role": "user", "content": "go"}
        async with client.responses.stream(input=[opening], **request) as stream:
            numbers = [event.sequence_number async for event in stream]
            response = await stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert response.output_text == "I read é and 😀 now."
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.usage.input_tokens_details.cached_tokens == 5
        replay = [item.model_dump(exclude_none=True, mode="json") for item in response.output]
        for item in replay:
            item.pop("parsed_arguments", None)
            for part in item.get("content", []):
                part.pop("parsed", None)
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "out " + item["name"]}
            for item in replay
            if item["type"] == "function_call"
        ]
        done = await client.responses.create(input=[opening, *replay, *outputs], **request)
        assert done.output_text == "Done: out noop"
        await client.close()


@pytest.mark.parametrize(
    ("stop", "anthropic", "chat", "responses"),
    [
        ("end_turn", "end_turn", "stop", ("completed", None)),
        ("max_tokens", "max_tokens", "length", ("incomplete", "max_output_tokens")),
        ("refusal", "refusal", "stop", ("completed", None)),
        ("content_filter", "refusal", "content_filter", ("incomplete", "content_filter")),
    ],
)
async def test_stop_reasons_in_each_format(
    stop: Stop, anthropic: str, chat: str, responses: tuple[str, str | None]
) -> None:
    async with ModelServer(plan(say("I stop.", stop=stop))) as server:
        for stream in (False, True):
            found = {}
            for path in PATHS:
                _, document, text = await send(server, path, body_for(path, stream=stream))
                found[path] = events(text) if stream else document
            if stream:
                assert found[ANTHROPIC][-2]["delta"]["stop_reason"] == anthropic
                assert found[CHAT][-1]["choices"][0]["finish_reason"] == chat
                last = found[RESPONSES][-1]["response"]
            else:
                assert found[ANTHROPIC]["stop_reason"] == anthropic
                assert found[CHAT]["choices"][0]["finish_reason"] == chat
                last = found[RESPONSES]
            assert (last["status"], (last["incomplete_details"] or {}).get("reason")) == responses


async def test_a_refusal_is_marked_as_one() -> None:
    async with ModelServer(plan(say("I cannot.", stop="refusal"))) as server:
        _, anthropic, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC))
        _, chat, _ = await send(server, CHAT, body_for(CHAT))
        _, responses, _ = await send(server, RESPONSES, body_for(RESPONSES))
        _, _, streamed = await send(server, RESPONSES, body_for(RESPONSES, stream=True))
    assert anthropic["stop_details"]["type"] == "refusal"
    assert chat["choices"][0]["message"]["refusal"] == "I cannot."
    assert responses["output"][0]["content"] == [{"type": "refusal", "refusal": "I cannot."}]
    assert "response.refusal.delta" in [event["type"] for event in events(streamed)]


async def test_the_number_of_tokens_is_the_number_of_deltas() -> None:
    async with ModelServer(plan(Answer(blocks=(Text("x" * 40),), timing=Timing(tokens=20)))) as server:
        _, _, text = await send(server, ANTHROPIC, body_for(ANTHROPIC, stream=True))
    assert len([event for event in events(text) if event["type"] == "content_block_delta"]) == 20


@pytest.mark.parametrize("path", PATHS)
async def test_byte_by_byte_is_the_same_stream(path: str) -> None:
    answer = Answer(blocks=(Text("é😀"), Call("f", {"a": "b"})), usage=Usage(input=1, output=1))
    slow = Answer(blocks=answer.blocks, usage=answer.usage, timing=Timing(chunk_bytes=1))
    async with ModelServer(plan(answer)) as one, ModelServer(plan(slow)) as two:
        whole = [_without_ids(event) for event in events((await send(one, path, body_for(path, stream=True)))[2])]
        bits = [_without_ids(event) for event in events((await send(two, path, body_for(path, stream=True)))[2])]
    assert whole == bits


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        volatile = ("id", "item_id", "call_id", "created", "created_at", "completed_at")
        return {key: _without_ids(item) for key, item in value.items() if key not in volatile}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_fast_mode_sends_the_same_with_fresh_ids(path: str, stream: bool) -> None:
    answer = Answer(blocks=(Text("hello"), Call("f", {"a": 1})), usage=Usage(input=3, output=4))
    async with ModelServer(plan(answer)) as slow, ModelServer(lambda _: answer, fast=True) as fast:
        body = body_for(path, stream=stream)
        normal = await send(slow, path, body)
        first, second = await send(fast, path, body), await send(fast, path, body)
        if stream:
            assert [_without_ids(e) for e in events(first[2])] == [_without_ids(e) for e in events(normal[2])]
        else:
            assert _without_ids(first[1]) == _without_ids(normal[1])
        assert first[2] != second[2]
        assert "TOKEN" not in first[2]
        assert fast.log.counts.answered == 2
        assert fast.log.last.raw == b""


async def test_other_paths_and_methods_are_not_answered() -> None:
    async with ModelServer() as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + "/v1/embeddings", data=b"{}") as response:
            assert response.status == 404
        async with session.get(server.url + ANTHROPIC) as response:
            assert response.status == 405


async def test_a_server_that_is_not_running_has_no_url() -> None:
    server = ModelServer()
    with pytest.raises(RuntimeError):
        _ = server.url
    await server.start()
    assert server.url.startswith("http://127.0.0.1:")
    await server.stop()
    await server.stop()
    with pytest.raises(RuntimeError):
        _ = server.url
