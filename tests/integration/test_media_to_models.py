"""Files of a conversation reach the model: in its format, in every request, as long as they fit."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.engine.known_models import facts_of
from omnara.engine.model_admin import ProviderSpec, add_model
from omnara.ids import IdKind, decode
from omnara.testing import HttpError, ModelServer, call, embed, embedded, say
from omnara.vault import Secret
from tests.contract.server import CONFIG, RING, ApiServer, api_server, model_server
from tests.support.pictures import PDF, block, office, png
from tests.support.postgres import PostgresForTests

DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
RESPONSES = "instruction: Be brief.\nmodel:\n  provider_config: openai\n  name: gpt-5.5\n"
CHAT = "instruction: Be brief.\nmodel:\n  provider_config: chat\n  name: small\n"
TOOLS = (
    "tools:\n  look:\n    type: custom\n    description: Looks.\n"
    "    input_schema: {type: object, properties: {path: {type: string}}}\n"
)
SOURCES = {"anthropic": CONFIG, "responses": RESPONSES, "chat": CHAT}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    openai: Any = {"openai_api_key": "sk-test-key-of-the-suite", "openai_base_url": f"{model.url}/v1"}
    openai["openai_api_format"] = "responses"
    async with postgres.fresh() as dsn, api_server(dsn, model, **openai) as running:
        chat = ProviderSpec(
            name="chat",
            api_format="openai_chat_completions",
            base_url=f"{model.url}/v1",
            request_path="/chat/completions",
            auth_kind="bearer_token",
        )
        org = decode(IdKind.ORG, running.org)
        await add_model(running.deps.db, RING, org, chat, Secret("sk-test-key-of-the-suite"), "small", facts_of("c-1"))
        yield running


async def tell(server: ApiServer, agent: str, script: str, *blocks: Any) -> None:
    """Send a message that says what the model will answer, with files, and wait for the answer."""
    body = {"content_blocks": [{"type": "text", "text": script}, *blocks]}
    answer = await server.call("POST", f"{agent}/inputs", body)
    assert answer.status == 201, answer.text


def last(model: ModelServer) -> Any:
    """The body of the last request."""
    return model.log.entries[-1].body


def contents(body: Any) -> list[Any]:
    """The parts of the last user message."""
    found: list[Any] = [message for message in body["messages"] if message["role"] == "user"][-1]["content"]
    return found


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_anthropic_gets_pictures_documents_and_texts(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent()
    long = ("ä" * 40_000).encode()
    await tell(
        server,
        agent,
        embed(say("seen")),
        block(png(), filename="a.png"),
        block(PDF, "application/pdf"),
        block(b"a,b\n1,2", "text/csv", filename="t.csv"),
        block(long, "text/plain"),
        block(office("word"), DOCX, filename="w.docx"),
    )
    assert (await server.settled(agent))["output"] == "seen"
    parts = contents(last(model))
    kinds = [part["type"] for part in parts]
    assert kinds == ["text", "text", "image", "text", "document", "text", "text", "text"]
    assert parts[1]["text"].endswith(f"a.png, image/png, {len(png())} bytes]")
    assert parts[2]["source"] == {"type": "base64", "media_type": "image/png", "data": encoded(png())}
    assert parts[4]["source"] == {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)}
    assert parts[5]["text"].endswith("]\na,b\n1,2")
    assert parts[6]["text"].endswith("Its first 8192 bytes:\n" + "ä" * 4096)
    assert "does not read files of this type" in parts[7]["text"]
    assert parts[-1]["cache_control"]


async def test_chat_gets_pictures_and_documents(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent(source=CHAT)
    await tell(server, agent, embed(say("seen")), block(png()), block(PDF, "application/pdf", filename="p.pdf"))
    assert (await server.settled(agent))["output"] == "seen"
    parts = contents(last(model))
    assert [part["type"] for part in parts] == ["text", "text", "image_url", "text", "file"]
    assert parts[2]["image_url"]["url"] == "data:image/png;base64," + encoded(png())
    assert parts[4]["file"] == {"filename": "p.pdf", "file_data": "data:application/pdf;base64," + encoded(PDF)}


@pytest.mark.parametrize("provider", list(SOURCES))
async def test_files_of_results_follow_their_call(server: ApiServer, model: ModelServer, provider: str) -> None:
    agent = await server.agent(source=SOURCES[provider] + TOOLS)
    await tell(server, agent, embed(call("look", {"path": "a"}), call("look", {"path": "b"}), say("seen")))
    await server.settled(agent, "waiting")
    outcomes = []
    for number in range(2):
        waiting = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
        for entry in waiting:
            outcome = "failed" if number else "succeeded"
            outcomes.append(outcome)
            body = {"outcome": outcome, "content_blocks": [{"type": "text", "text": "here"}, block(png(number + 1, 1))]}
            answer = await server.call("POST", f"{agent}/tool-calls/{entry['id']}/result", body)
            assert answer.status == 201, answer.text
        await server.settled(agent, "waiting" if not number and len(outcomes) < 2 else "idle")
    assert outcomes == ["succeeded", "failed"]
    assert (await server.settled(agent))["output"] == "seen"
    raw = model.log.entries[-1].raw
    assert encoded(png(1, 1)).encode() in raw
    assert encoded(png(2, 1)).encode() in raw


@pytest.mark.parametrize("provider", list(SOURCES))
async def test_the_next_request_begins_with_the_last(server: ApiServer, model: ModelServer, provider: str) -> None:
    agent = await server.agent(source=SOURCES[provider])
    await tell(server, agent, embed(say("one")), block(png()))
    await server.settled(agent)
    before = model.log.entries[-1].raw
    await tell(server, agent, embed(say("two")))
    assert (await server.settled(agent))["output"] == "two"
    after = model.log.entries[-1].raw
    end = before.rindex(b',"cache_control"') if provider == "anthropic" else before.rindex(b"]}]")
    assert after.startswith(before[:end])
    assert encoded(png()).encode() in after


async def test_a_model_of_texts_is_told_of_the_picture(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent()
    await tell(server, agent, embed(say("seen")), block(png(9000, 1)))
    assert (await server.settled(agent))["output"] == "seen"
    parts = contents(last(model))
    assert [part["type"] for part in parts] == ["text", "text"]
    assert "9000 x 1 pixels are too large a picture" in parts[1]["text"]


async def test_a_message_may_be_a_file_alone(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent(embed(say("one"), say("two")))
    await server.settled(agent)
    answer = await server.call("POST", f"{agent}/inputs", {"content_blocks": [block(PDF, "application/pdf")]})
    assert answer.status == 201
    await server.settled(agent)
    assert [part["type"] for part in contents(last(model))] == ["text", "document"]


@pytest.mark.parametrize("provider", list(SOURCES))
async def test_a_refused_picture_does_not_end_the_conversation(
    server: ApiServer, model: ModelServer, provider: str
) -> None:
    """Source: field-reports B03."""
    agent = await server.agent(source=SOURCES[provider])
    await tell(server, agent, embed(say("one"), say("two"), say("three")), block(png()))
    assert (await server.settled(agent))["output"] == "one"
    unreadable = png(7, 7).replace(b"IDAT", b"iDAt")
    body = {"content_blocks": [{"type": "text", "text": "and this?"}, block(unreadable)]}
    assert (await server.call("POST", f"{agent}/inputs", body)).status == 201
    assert (await server.settled(agent))["output"] == "two"
    statuses = [entry.status for entry in model.log.entries]
    assert statuses[-2:] == [400, 200]
    raw = model.log.entries[-1].raw
    assert encoded(png()).encode() in raw, "the picture before it stays"
    assert b"the model's provider refused it" in raw
    await server.say(agent, "go on")
    assert (await server.settled(agent))["output"] == "three"
    assert [entry.status for entry in model.log.entries][len(statuses) :] == [200]


@pytest.mark.parametrize("provider", list(SOURCES))
async def test_a_request_that_is_too_large_goes_on_without_its_pictures(
    server: ApiServer, model: ModelServer, provider: str
) -> None:
    """First the newest is left out, then the others; what was refused is not sent again. Source: field-reports B03."""
    agent = await server.agent(source=SOURCES[provider])
    await tell(server, agent, embed(say("one"), say("two"), say("three"), say("four")), block(png(21, 1)))
    assert (await server.settled(agent))["output"] == "one"
    for times, picture, answer in ((1, png(22, 1), "two"), (2, png(23, 1), "three")):
        asked = len(model.log.entries)
        model.faults.push(HttpError(413), times=times)
        body = {"content_blocks": [{"type": "text", "text": "and this?"}, block(picture)]}
        assert (await server.call("POST", f"{agent}/inputs", body)).status == 201
        assert (await server.settled(agent))["output"] == answer
        assert [entry.status for entry in model.log.entries[asked:]] == [413] * times + [200]
        raw = model.log.entries[-1].raw
        assert encoded(picture).encode() not in raw
        assert (encoded(png(21, 1)).encode() in raw) == (times == 1), "the picture before it stays while that helps"
    await server.say(agent, "go on")
    assert (await server.settled(agent))["output"] == "four"
    assert model.log.entries[-1].status == 200
    [steps] = await server.rows("select count(*) from steps where attempt > 1")
    assert steps[0] == 0, "no attempt was used up"
