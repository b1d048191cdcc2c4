"""What the real providers refuse is refused: one case per rule, each a change to a request that is accepted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from omnara.testing import Answer, Call, ModelServer, Strictness, Text, Thinking, plan, say
from tests.unit.test_model_server import ANTHROPIC, CHAT, KEYS, PATHS, RESPONSES, body_for, send

Edit = Callable[[dict[str, Any]], Any]


def _call(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "read_file", "input": {"path": name}}


def _result(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": "text", **more}


ANTHROPIC_OK: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 5000,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "read_file", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "text", "text": "Reading."}, _call("t1"), _call("t2")]},
        {"role": "user", "content": [_result("t1"), _result("t2"), {"type": "text", "text": "also"}]},
    ],
}

CHAT_OK: dict[str, Any] = {
    "model": "scripted",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "also"}]},
    ],
}

RESPONSES_OK: dict[str, Any] = {
    "model": "scripted",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "input": [
        {"role": "user", "content": "go"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Reading."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
    ],
}


def _set(*path: Any) -> Edit:
    """Set the place `path[:-1]` to `path[-1]`."""

    def edit(body: dict[str, Any]) -> None:
        place: Any = body
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]

    return edit


def _drop(*path: Any) -> Edit:
    def edit(body: dict[str, Any]) -> None:
        place: Any = body
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return edit


ANTHROPIC_CASES: dict[str, tuple[Edit, str]] = {
    "no result": (_drop("messages", 2, "content", 0), "messages.1: `tool_use` ids were found without `tool_result`"),
    "last message asks": (_drop("messages", 2), "immediately after: t1, t2."),
    "text before results": (
        lambda b: b["messages"][2]["content"].insert(0, {"type": "text", "text": "wait"}),
        "messages.1: `tool_use` ids were found",
    ),
    "user text between": (
        lambda b: b["messages"].insert(2, {"role": "user", "content": "wait"}),
        "messages.1: `tool_use` ids were found",
    ),
    "results split over two messages": (
        lambda b: b["messages"].append({"role": "user", "content": [b["messages"][2]["content"].pop(1)]}),
        "immediately after: t2.",
    ),
    "result of nothing": (
        _set("messages", 0, {"role": "user", "content": [_result("t0")]}),
        "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: t0",
    ),
    "answered twice": (
        lambda b: b["messages"][2]["content"].insert(1, _result("t1")),
        "each tool_use must have a single result. Found multiple `tool_result` blocks with id: t1",
    ),
    "same id twice": (_set("messages", 1, "content", 2, "id", "t1"), "`tool_use` ids must be unique"),
    "empty text": (_set("messages", 1, "content", 0, "text", ""), "text content blocks must be non-empty"),
    "blank text": (_set("messages", 1, "content", 0, "text", " \n"), "must contain non-whitespace text"),
    "blank string": (_set("messages", 0, "content", "  "), "must contain non-whitespace text"),
    "empty string": (_set("messages", 0, "content", ""), "messages.0: all messages must have non-empty content"),
    "empty list": (_set("messages", 0, "content", []), "messages.0: all messages must have non-empty content"),
    "empty text in a result": (
        _set("messages", 2, "content", 0, "content", [{"type": "text", "text": ""}]),
        "text content blocks must be non-empty",
    ),
    "error without text": (
        _set("messages", 2, "content", 0, _result("t1", content="", is_error=True)),
        "content cannot be empty if `is_error` is true",
    ),
    "empty system text": (_set("system", 0, "text", ""), "system: text content blocks must be non-empty"),
    "no max_tokens": (_drop("max_tokens"), "max_tokens: Field required"),
    "max_tokens 0": (_set("max_tokens", 0), "max_tokens: Input should be greater than or equal to 1"),
    "max_tokens too large": (_set("max_tokens", 64_001), "max_tokens: 64001 > 64000"),
    "max_tokens a text": (_set("max_tokens", "9"), "max_tokens: Input should be a valid integer"),
    "no messages": (_drop("messages"), "messages: Field required"),
    "empty messages": (_set("messages", []), "at least one message is required"),
    "assistant first": (_drop("messages", 0), 'first message must use the "user" role'),
    "system role": (_set("messages", 0, "role", "system"), "messages.0.role: Input should be"),
    "extra in message": (_set("messages", 0, "id", "x"), "messages.0.id: Extra inputs are not permitted"),
    "extra on top": (_set("foo", 1), "foo: Extra inputs are not permitted"),
    "tool name": (_set("tools", 0, "name", "read file"), "tools.0.custom.name: String should match pattern"),
    "tool name too long": (_set("tools", 0, "name", "x" * 129), "tools.0.custom.name: String should match pattern"),
    "tool twice": (lambda b: b["tools"].append(b["tools"][0]), "Tool names must be unique"),
    "no schema": (_drop("tools", 0, "input_schema"), "tools.0.custom.input_schema: Field required"),
    "schema is a list": (_set("tools", 0, "input_schema", []), "input_schema: Input should be a valid dictionary"),
    "schema without type": (_set("tools", 0, "input_schema", {}), "input_schema.type: Field required"),
    "schema of a string": (_set("tools", 0, "input_schema", "type", "string"), "Input should be 'object'"),
    "input a text": (_set("messages", 1, "content", 1, "input", "{}"), "tool_use.input: Input should be a valid dict"),
    "odd call id": (_set("messages", 1, "content", 1, "id", "a.b"), "tool_use.id: String should match pattern"),
    "odd call name": (_set("messages", 1, "content", 1, "name", "a b"), "tool_use.name: String should match pattern"),
    "prefill ends blank": (
        lambda b: b["messages"].append({"role": "assistant", "content": "So "}),
        "final assistant content cannot end with trailing whitespace",
    ),
    "call in a user message": (_set("messages", 0, "content", [_call("t9")]), "not permitted in `user` messages"),
    "temperature": (_set("temperature", 1.5), "temperature: range: 0..1"),
    "thinking budget": (_set("thinking", {"type": "enabled", "budget_tokens": 10}), "greater than or equal to 1024"),
    "thinking over max_tokens": (
        _set("thinking", {"type": "enabled", "budget_tokens": 5000}),
        "`max_tokens` must be greater than `thinking.budget_tokens`",
    ),
    "thinking not first": (
        _set("thinking", {"type": "enabled", "budget_tokens": 2000}),
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `text`",
    ),
    "thinking last": (
        _set("messages", 1, "content", [{"type": "thinking", "thinking": "x", "signature": "y"}]),
        "Invalid `signature` in `thinking` block",
    ),
    "no signature": (
        _set("messages", 1, "content", 0, {"type": "thinking", "thinking": "x"}),
        "messages.1.content.0.thinking.signature: Field required",
    ),
    "unknown block": (_set("messages", 0, "content", [{"type": "poem"}]), "`poem` blocks are not permitted"),
}

CHAT_CASES: dict[str, tuple[Edit, str]] = {
    "no result": (_drop("messages", 4), "tool_call_ids did not have response messages: c2"),
    "last message asks": (lambda b: b.update(messages=b["messages"][:3]), "response messages: c1, c2"),
    "user text between": (
        lambda b: b["messages"].insert(4, {"role": "user", "content": "wait"}),
        "did not have response messages: c2",
    ),
    "result of nothing": (
        lambda b: b["messages"].insert(1, {"role": "tool", "tool_call_id": "c0", "content": "x"}),
        "must be a response to a preceeding message with 'tool_calls'",
    ),
    "unknown id": (
        lambda b: b["messages"].insert(3, {"role": "tool", "tool_call_id": "c9", "content": "x"}),
        "'tool_call_id' of 'c9' not found",
    ),
    "answered twice": (
        lambda b: b["messages"].insert(4, {"role": "tool", "tool_call_id": "c1", "content": "x"}),
        "'tool_call_id' of 'c1' not found",
    ),
    "same id twice": (_set("messages", 2, "tool_calls", 1, "id", "c1"), "Duplicate value for 'tool_call_id' of 'c1'"),
    "null content": (_set("messages", 1, "content", None), "expected a string, got null"),
    "assistant says nothing": (_drop("messages", 2, "tool_calls"), "expected a string, got null"),
    "empty list": (_set("messages", 1, "content", []), "Invalid 'messages[1].content': empty array"),
    "blank string": (_set("messages", 1, "content", " "), "must contain non-whitespace text"),
    "blank part": (_set("messages", 5, "content", 0, "text", ""), "messages[5].content[0].text"),
    "empty calls": (_set("messages", 2, "tool_calls", []), "Invalid 'messages[2].tool_calls': empty array"),
    "arguments an object": (
        _set("messages", 2, "tool_calls", 0, "function", "arguments", {}),
        "expected a string, but got an object instead",
    ),
    "arguments cut": (
        _set("messages", 2, "tool_calls", 0, "function", "arguments", '{"a": '),
        "the arguments are not valid JSON",
    ),
    "call name": (_set("messages", 2, "tool_calls", 0, "function", "name", "a b"), "does not match pattern"),
    "tool name": (_set("tools", 0, "function", "name", "a.b"), "Invalid 'tools[0].function.name'"),
    "tool name too long": (_set("tools", 0, "function", "name", "x" * 65), "maximum length 64"),
    "schema": (_set("tools", 0, "function", "parameters", {"type": "string"}), "schema must be a JSON Schema of"),
    "no tools in the list": (_set("tools", []), "Invalid 'tools': empty array"),
    "no messages": (_drop("messages"), "Missing required parameter: 'messages'"),
    "empty messages": (_set("messages", []), "Invalid 'messages': empty array"),
    "role": (_set("messages", 0, "role", "robot"), "Invalid value: 'robot'"),
    "temperature": (_set("temperature", 2.5), "Expected a value <= 2, but got 2.5"),
    "temperature a text": (_set("temperature", "1"), "Invalid type for 'temperature'"),
    "usage without stream": (_set("stream_options", {"include_usage": True}), "only allowed when 'stream' is enabled"),
    "unknown parameter": (_set("foo", 1), "Unknown parameter: 'foo'"),
    "max_tokens of a reasoning model": (
        lambda b: b.update(model="scripted-reasoning", max_tokens=100),
        "Use 'max_completion_tokens' instead",
    ),
    "temperature of a reasoning model": (
        lambda b: b.update(model="scripted-reasoning", temperature=0.5),
        "Only the default (1) value is supported",
    ),
    "max_tokens 0": (_set("max_tokens", 0), "integer below minimum value"),
}

RESPONSES_CASES: dict[str, tuple[Edit, str]] = {
    "no result": (_drop("input", 3), "No tool output found for function call c1."),
    "result of nothing": (_drop("input", 2), "No tool call found for function call output with call_id c1."),
    "answered twice": (lambda b: b["input"].append(b["input"][3]), "Duplicate output for function call c1"),
    "same call twice": (lambda b: b["input"].append(b["input"][2]), "Duplicate function call with call_id c1"),
    "result before the call": (
        lambda b: b["input"].insert(1, b["input"].pop(3)),
        "No tool call found for function call output",
    ),
    "empty input": (_set("input", []), "Invalid 'input': empty array"),
    "no input": (_drop("input"), "Missing required parameter: 'input'"),
    "blank input": (_set("input", "  "), "must not be blank"),
    "blank text": (_set("input", 0, "content", " "), "must not be blank"),
    "blank part": (_set("input", 1, "content", 0, "text", ""), "must not be blank"),
    "user part from the assistant": (
        _set("input", 1, "content", 0, "type", "input_text"),
        "Supported values are: 'output_text' and 'refusal'",
    ),
    "output an object": (_set("input", 3, "output", {}), "Invalid type for 'input[3].output'"),
    "arguments an object": (_set("input", 2, "arguments", {}), "Invalid type for 'input[2].arguments'"),
    "odd id": (_set("input", 2, "id", "call_1"), "Expected an ID that begins with 'fc'"),
    "tool name": (_set("tools", 0, "name", "a b"), "Invalid 'tools[0].name'"),
    "schema": (_set("tools", 0, "parameters", {"type": "array"}), "schema must be a JSON Schema"),
    "empty call id": (_set("input", 2, "call_id", ""), "Invalid 'input[2].call_id': empty string"),
    "long call id": (_set("input", 2, "call_id", "c" * 65), "Invalid 'input[2].call_id': string too long"),
    "long result id": (_set("input", 3, "call_id", "c" * 65), "Invalid 'input[3].call_id': string too long"),
    "long item id": (_set("input", 2, "id", "fc_" + "c" * 62), "Invalid 'input[2].id': string too long"),
    "few tokens": (_set("max_output_tokens", 5), "Expected a value >= 16"),
    "temperature": (_set("temperature", -1), "Expected a value >= 0"),
    "temperature of a reasoning model": (
        lambda b: b.update(model="scripted-reasoning", temperature=0.5),
        "'temperature' is not supported with this model",
    ),
    "earlier response": (_set("previous_response_id", "resp_1"), "Previous response with id 'resp_1' not found"),
    "unknown parameter": (_set("messages", []), "Unknown parameter: 'messages'"),
    "unknown item": (lambda b: b["input"].append({"type": "poem"}), "Invalid value: 'poem'"),
    "loose reasoning": (
        lambda b: b["input"].append({"type": "reasoning", "id": "rs_1", "summary": []}),
        "Items are not persisted when `store` is set to false",
    ),
}

CASES = [
    pytest.param(path, good, edit, words, id=f"{name}: {label}")
    for name, path, good, cases in (
        ("anthropic", ANTHROPIC, ANTHROPIC_OK, ANTHROPIC_CASES),
        ("chat", CHAT, CHAT_OK, CHAT_CASES),
        ("responses", RESPONSES, RESPONSES_OK, RESPONSES_CASES),
    )
    for label, (edit, words) in cases.items()
]


@pytest.mark.parametrize(
    ("path", "good"), [(ANTHROPIC, ANTHROPIC_OK), (CHAT, CHAT_OK), (RESPONSES, RESPONSES_OK)], ids=PATHS
)
async def test_the_request_that_the_cases_change_is_accepted(path: str, good: dict[str, Any]) -> None:
    async with ModelServer() as server:
        status, _, text = await send(server, path, good)
        assert (status, server.log.counts.refused) == (200, 0), text


@pytest.mark.parametrize(("path", "good", "edit", "words"), CASES)
async def test_refused(path: str, good: dict[str, Any], edit: Edit, words: str) -> None:
    body = copy.deepcopy(good)
    edit(body)
    async with ModelServer() as server:
        status, answer, _ = await send(server, path, body)
        assert words in answer["error"]["message"]
        assert status == (404 if "persisted" in words else 400)
        assert answer["error"]["type"] == "invalid_request_error"
        assert (answer.get("type") == "error") == (path == ANTHROPIC)
        assert set(answer["error"]) == (
            {"type", "message"} if path == ANTHROPIC else {"message", "type", "param", "code"}
        )
        assert server.log.last.outcome == "refused"
        assert server.log.last.detail == answer["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_lenient_server_accepts_what_can_be_read(path: str) -> None:
    async with ModelServer(plan(say("fine")), lenient=True) as server:
        status, _, _ = await send(server, path, body_for(path, text="  ", model="nobody", foo=1), headers={})
    assert status == 200


async def test_cache_marks_are_counted_everywhere_but_in_arguments() -> None:
    mark = {"type": "ephemeral"}
    body = copy.deepcopy(ANTHROPIC_OK)
    body["messages"][1]["content"][1]["input"]["cache_control"] = mark
    body["tools"][0]["cache_control"] = mark
    for number in range(2):
        body["messages"][2]["content"][number]["cache_control"] = mark
    async with ModelServer() as server:
        assert (await send(server, ANTHROPIC, body))[0] == 200
        body["messages"][2]["content"][2]["cache_control"] = mark
        status, answer, _ = await send(server, ANTHROPIC, body)
    assert (status, answer["error"]["message"]) == (
        400,
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    )


@pytest.mark.parametrize("path", PATHS)
async def test_keys_models_and_sizes(path: str) -> None:
    async with ModelServer(strict=Strictness(keys=frozenset({"secret"}), max_body=50_000)) as server:
        bad = {**KEYS, "x-api-key": "other", "authorization": "Bearer other"}
        wrong = await send(server, path, body_for(path), bad)
        none = await send(server, path, body_for(path), {"anthropic-version": "2023-06-01"})
        unknown = await send(server, path, body_for(path, model="nobody"))
        long = await send(server, path, body_for(path, text="word " * 2000, model="scripted-small"))
        large = await send(server, path, body_for(path, text="x" * 60_000))
        good = await send(server, path, body_for(path))
    assert [wrong[0], none[0], unknown[0], long[0], large[0], good[0]] == [401, 401, 404, 400, 413, 200]
    if path == ANTHROPIC:
        assert wrong[1]["error"] == {"type": "authentication_error", "message": "invalid x-api-key"}
        assert unknown[1]["error"] == {"type": "not_found_error", "message": "model: nobody"}
        assert large[1]["error"]["type"] == "request_too_large"
        assert long[1]["error"]["message"].startswith("prompt is too long: ")
        assert long[1]["error"]["message"].endswith(" tokens > 2000 maximum")
    else:
        assert wrong[1]["error"]["code"] == "invalid_api_key"
        assert unknown[1]["error"]["code"] == "model_not_found"
        assert long[1]["error"]["code"] == "context_length_exceeded"


async def test_the_version_header_is_required() -> None:
    async with ModelServer() as server:
        status, answer, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC), {"x-api-key": "secret"})
    assert (status, answer["error"]["message"]) == (400, "anthropic-version: header is required")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "damage",
    [b'"h\xff"', b'"\\ud83d"', b'"\\ude00 x"', b'"\xed\xa0\xbd"', b"nope", b'"open', b"[" * 5000],
    ids=["utf-8", "high surrogate", "low surrogate", "encoded surrogate", "word", "open", "deep"],
)
async def test_unreadable_bodies_are_refused(path: str, damage: bytes) -> None:
    raw = json.dumps(body_for(path, text="@")).encode().replace(b'"@"', damage)
    async with ModelServer() as server:
        status, answer, _ = await send(server, path, raw)
    assert status == 400
    assert "not valid JSON" in answer["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [[], "x", 1, None, {}, {"model": 5}, {"model": ""}])
async def test_other_json_is_refused(path: str, body: Any) -> None:
    async with ModelServer() as server:
        assert (await send(server, path, body))[0] == 400


async def _thought(server: ModelServer, model: str, *, redacted: bool = False) -> list[dict[str, Any]]:
    server.script = plan(Answer(blocks=(Thinking("deep", redacted=redacted), Text("So."), Call("f"))), say("end"))
    _, answer, _ = await send(server, ANTHROPIC, body_for(ANTHROPIC, model=model))
    return list(answer["content"])


def _continued(content: list[dict[str, Any]], model: str) -> dict[str, Any]:
    body = body_for(ANTHROPIC, model=model)
    body["messages"] += [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [_result(content[-1]["id"])]},
    ]
    return body


async def test_signed_thinking_comes_back_unchanged_and_to_its_own_model() -> None:
    async with ModelServer() as server:
        content = await _thought(server, "scripted")
        changed = copy.deepcopy(content)
        changed[0]["thinking"] = "deep "
        resigned = copy.deepcopy(content)
        resigned[0]["signature"] = resigned[0]["signature"][::-1]
        outcomes = [
            await send(server, ANTHROPIC, _continued(blocks, model))
            for blocks, model in (
                (content, "scripted"),
                (content[1:], "scripted"),
                (content, "scripted-2"),
                (content[1:], "scripted-2"),
                (changed, "scripted"),
                (resigned, "scripted"),
            )
        ]
    assert [status for status, _, _ in outcomes] == [200, 200, 400, 200, 400, 400]
    assert outcomes[2][1]["error"]["message"] == "messages.1.content.0: Invalid `signature` in `thinking` block"


async def test_a_signature_is_good_for_another_server() -> None:
    async with ModelServer() as first:
        content = await _thought(first, "scripted")
    async with ModelServer() as second:
        assert (await send(second, ANTHROPIC, _continued(content, "scripted")))[0] == 200


async def test_redacted_thinking_is_bound_to_its_model_too() -> None:
    async with ModelServer() as server:
        content = await _thought(server, "scripted", redacted=True)
        assert content[0]["type"] == "redacted_thinking"
        broken = copy.deepcopy(content)
        broken[0]["data"] = "AAAA" + broken[0]["data"][4:]
        statuses = [
            (await send(server, ANTHROPIC, _continued(blocks, model)))[0]
            for blocks, model in ((content, "scripted"), (content, "scripted-2"), (broken, "scripted"))
        ]
    assert statuses == [200, 400, 400]


async def test_an_answer_cannot_end_in_thinking() -> None:
    async with ModelServer() as server:
        content = await _thought(server, "scripted")
        body = body_for(ANTHROPIC)
        body["messages"] += [{"role": "assistant", "content": content[:1]}, {"role": "user", "content": "go on"}]
        status, answer, _ = await send(server, ANTHROPIC, body)
    assert (status, answer["error"]["message"]) == (
        400,
        "messages.1: The final block in an assistant message cannot be `thinking`.",
    )


async def test_reasoning_items_travel_with_what_they_led_to() -> None:
    answer = Answer(blocks=(Thinking("hm"), Call("f"), Call("f")))
    async with ModelServer(plan(answer, say("end"))) as server:
        base = body_for(RESPONSES, include=["reasoning.encrypted_content"], store=False)
        _, response, _ = await send(server, RESPONSES, base)
        reasoning, first, second = response["output"]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"} for item in (first, second)
        ]

        async def outcome(items: list[Any], model: str = "scripted") -> tuple[int, str | None]:
            body = {**base, "model": model, "input": [*base["input"], *items, *outputs]}
            status, document, _ = await send(server, RESPONSES, body)
            return status, document.get("error") and document["error"]["message"]

        assert await outcome([reasoning, first, second]) == (200, None)
        assert await outcome([{k: v for k, v in first.items() if k != "id"}, second]) == (200, None)
        assert (await outcome([first, second]))[1] == (
            f"Item '{first['id']}' of type 'function_call' was provided without its required 'reasoning' item: "
            f"'{reasoning['id']}'."
        )
        assert "could not be verified" in (await outcome([reasoning, first, second], "scripted-2"))[1]
        changed = {**reasoning, "encrypted_content": "AAAA" + reasoning["encrypted_content"][4:]}
        assert "could not be verified" in (await outcome([changed, first, second]))[1]
        unsealed = {k: v for k, v in reasoning.items() if k != "encrypted_content"}
        assert (await outcome([unsealed, first, second]))[0] == 404
        body = {**base, "input": [*base["input"], reasoning]}
        assert "without its required following item" in (await send(server, RESPONSES, body))[1]["error"]["message"]
        twice = {**base, "input": [*base["input"], reasoning, first, second, *outputs, reasoning, first]}
        assert "Duplicate item found with id" in (await send(server, RESPONSES, twice))[1]["error"]["message"]
