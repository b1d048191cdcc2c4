"""Requests to OpenAI Responses: what is asked for, files, and the official client's opinion."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.domain.content import MediaRefBlock, TextBlock
from omnara.domain.context import ContextState
from omnara.providers import ModelCall, ModelGateway, RenderedHistory
from omnara.providers.media import ModelFile
from omnara.providers.openai_responses import OpenAIResponses
from omnara.testing import (
    Answer,
    Call,
    ModelServer,
    ModelSpec,
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
from tests.support.responses_stream import finished, message, target


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[Canned]:
    async with canned() as endpoint:
        yield endpoint


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
