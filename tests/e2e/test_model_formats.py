"""All wire formats through the front door: real servers, restarted in between, and the strict scripted model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from omnara.client import Client
from omnara.testing import Answer, Call, Conversation, Entry, ModelServer, ModelSpec, Strictness, Text, Thinking
from tests.e2e.served import Served, served
from tests.e2e.test_cli import omnara
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

LOOK = {
    "name": "look",
    "description": "Looks at a path.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
MODELS = {name: ModelSpec(reasoning=name != "plain") for name in ("gpt-5.4", "gpt-next", "plain", "claude-opus-5")}


def script(conversation: Conversation) -> Answer:
    """Two rounds of calls for each message, then a word; each answer is thought about."""
    turn = conversation.turn
    if turn % 3 == 2:
        return Answer(blocks=(Thinking(f"Enough {turn}."), Text(f"Done {turn}.")))
    calls = (Call("look", {"path": f"{turn}-a"}), Call("look", {"path": f"{turn}-b"}))
    return Answer(blocks=(Thinking(f"Why {turn}?"), Text(f"Looking {turn}."), *calls))


def providers(model: ModelServer) -> dict[str, str]:
    return {"OPENAI_API_KEY": "scripted", "OPENAI_BASE_URL": f"{model.url}/v1", "OPENAI_API_FORMAT": "responses"}


async def open_calls(client: Client, agent: str) -> list[str]:
    """The ids of the two calls of a round, once both wait for their results."""
    found: list[str] = []

    async def there() -> bool:
        found[:] = [one.id for one in await client.tool_calls(agent) if one.state == "ready"]
        return len(found) == 2

    await until(there, "both calls of a round are ready")
    return found


async def answer_calls(client: Client, agent: str, round_: int) -> None:
    """Answer both calls of a round, the second one first."""
    for call in reversed(await open_calls(client, agent)):
        await client.answer_call(agent, call, f"seen in round {round_}")


async def said(client: Client, agent: str, text: str) -> None:
    async def there() -> bool:
        return text in [event.text.strip() for event in await log(client, agent)]

    await until(there, text)


async def log(client: Client, agent: str) -> list[Any]:
    return [event async for event in client.events(agent)]


def items(entry: Entry, kind: str) -> list[Any]:
    return [item for item in entry.body["input"] if item.get("type") == kind]


async def test_reasoning_goes_back_over_several_turns_and_a_restart(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with ModelServer(script, strict=Strictness(models=MODELS)) as model, postgres.fresh() as dsn:
        async with served(dsn, tmp_path, model, providers(model)) as first:
            kept = first.environment
            async with Client(first.url, first.key) as client:
                launched = await client.launch(
                    model="openai/gpt-5.4", system_prompt="Be brief.", tools=[LOOK], message="go", temperature=0.5
                )
                agent = launched.id
                await answer_calls(client, agent, 0)
                await until(lambda: len(model.log.entries) == 2, "the second request")
        async with served(dsn, tmp_path, model, kept) as second, Client(second.url, second.key) as client:
            await answer_calls(client, agent, 1)
            await said(client, agent, "Done 2.")
            await client.send(agent, "again")
            await answer_calls(client, agent, 3)
            await answer_calls(client, agent, 4)
            await said(client, agent, "Done 5.")
            usage = await client.status(agent)
        entries = list(model.log.entries)
    assert usage.id == agent
    assert [(entry.path, entry.status) for entry in entries] == [("/v1/responses", 200)] * 6
    assert len({entry.body["prompt_cache_key"] for entry in entries}) == 1
    last = entries[-1]
    assert last.body["store"] is False
    assert [item["summary"][0]["text"] for item in items(last, "reasoning")] == [
        "Why 0?", "Why 1?", "Enough 2.", "Why 3?", "Why 4?"
    ]  # fmt: skip
    assert [item["output"] for item in items(last, "function_call_output")] == [
        f"seen in round {number}" for number in (0, 0, 1, 1, 3, 3, 4, 4)
    ]
    asked = [item["call_id"] for item in items(last, "function_call")]
    assert [item["call_id"] for item in items(last, "function_call_output")] == asked
    for before, after in itertools.pairwise(entries):
        # Nothing that was sent once is ever sent otherwise, whichever process sends it.
        start = before.raw[: before.raw.rindex(b"]}")]
        assert after.raw.startswith(start)


async def change_model(served_: Served, client: Client, agent: str, model: str) -> None:
    provider, _, name = model.partition("/")
    source = f"""instruction: Be brief.
model: {{provider_config: {provider}, name: {name}}}
tools:
  look:
    type: custom
    description: Looks at a path.
    input_schema: {{type: object, properties: {{path: {{type: string}}}}}}
"""
    path = (await client.links(agent)).inputs.removesuffix("/inputs") + "/config"
    body = {"source": source, "source_format": "yaml"}
    headers = {"Authorization": f"Bearer {served_.key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(served_.url + path, json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_one_conversation_wanders_through_all_formats(
    postgres: PostgresForTests, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """The model changes while calls are open: the exchange goes on with another provider."""
    names = ("openai/gpt-next", "anthropic/claude-opus-5", "lab/plain")
    route = [names[number] for number in order]
    async with (
        ModelServer(script, strict=Strictness(models=MODELS)) as model,
        postgres.fresh() as dsn,
        served(dsn, tmp_path, model, providers(model)) as server,
        Client(server.url, server.key) as client,
    ):
        caller = server.environment | {"OMNARA_URL": server.url, "OMNARA_API_KEY": server.key}
        added = await omnara(
            "models", "add", "lab/plain", "--format", "openai-chat", "--base-url", f"{model.url}/v1", "--key-stdin",
            environment=caller, stdin="k\n",
        )  # fmt: skip
        assert added.code == 0, added.err
        # Any name of an environment's provider becomes a model with the first agent that names it.
        await client.launch(model="openai/gpt-next", system_prompt="x")
        agent = (await client.launch(model=route[0], system_prompt="Be brief.", tools=[LOOK], message="go")).id
        for round_, name in enumerate(route[1:]):
            await open_calls(client, agent)
            await change_model(server, client, agent, name)
            await answer_calls(client, agent, round_)
        await said(client, agent, "Done 2.")
        await change_model(server, client, agent, route[0])
        await client.send(agent, "again")
        await until(lambda: len(model.log.entries) == 4, "a request of each")
        entries = list(model.log.entries)
    assert [entry.status for entry in entries] == [200] * 4
    assert [entry.model for entry in entries] == [name.partition("/")[2] for name in (*route, route[0])]
    assert b"seen in round 1" in entries[3].raw
    # The first model gets its own reasoning back, and nobody else's.
    thoughts = [text for text in (b"Why 0?", b"Why 1?", b"Enough 2.") if text in entries[3].raw]
    assert thoughts == [b"Why 0?"]


async def test_a_model_of_that_format_is_added_probed_and_used(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with (
        ModelServer(script, strict=Strictness(models=MODELS)) as model,
        postgres.fresh() as dsn,
        served(dsn, tmp_path, model, providers(model)) as server,
        Client(server.url, server.key) as client,
    ):
        caller = server.environment | {"OMNARA_URL": server.url, "OMNARA_API_KEY": server.key}
        added = await omnara(
            "models", "add", "acme/large", "--format", "openai-responses", "--base-url", f"{model.url}/v1",
            "--slug", "gpt-next", "--reasoning", "--key-stdin", environment=caller, stdin="canary-key\n",
        )  # fmt: skip
        assert added.code == 0, added.err
        listed = (await omnara("models", "list", "--json", environment=caller)).json()
        formats = {row["provider_config"]: row["api_format"] for row in listed}
        assert formats == {"acme": "openai_responses", "openai": "openai_responses", "anthropic": "anthropic_messages"}
        for provider, configured in (("acme", "acme/large"), ("openai", "openai/gpt-5.4")):
            probed = await omnara("models", "probe", provider, "--json", environment=caller)
            assert configured in [name for entry in probed.json()["models"] for name in entry["configured"]]
        agent = (await client.launch(model="acme/large", system_prompt="x", tools=[LOOK], message="go")).id
        await answer_calls(client, agent, 0)
        await answer_calls(client, agent, 1)
        await said(client, agent, "Done 2.")
        assert [(entry.path, entry.model) for entry in model.log.entries] == [("/v1/responses", "gpt-next")] * 3
        assert len(items(model.log.entries[-1], "reasoning")) == 2
