"""Many clients, two replicas, one database: of clashing requests one wins, and repeated ones have one effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from omnara.testing import ModelServer, call, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests

TOOLS = (
    CONFIG
    + """tools:
  risky: {type: custom, description: R, input_schema: {type: object}, permission: {mode: always_ask}}
  look: {type: custom, description: L, input_schema: {type: object}}
"""
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replicas(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[tuple[ApiServer, ApiServer]]:
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, model) as one,
        api_server(dsn, model, roles=frozenset({"api"})) as two,
    ):
        # The same person on both, as behind a load balancer.
        two.key = one.key
        yield one, two


async def test_allow_and_deny_do_not_both_win(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, _ = replicas
    agent = await one.agent(embed(call("risky", {}), say("done")), source=TOOLS)
    await one.settled(agent, "waiting")
    (form,) = (await one.get(f"{agent}/interactions"))["data"]
    path = f"{agent}/interactions/{form['id']}/resolve"

    async def answer(number: int) -> tuple[int, int]:
        choice = number // 2 % 2
        sent = {"answers": [{"option_indices": [choice]}]}
        return choice, (await replicas[number % 2].call("POST", path, sent)).status

    found = Counter(await asyncio.gather(*(answer(number) for number in range(24))))
    won = next(choice for choice, status in found if status == 200)
    assert found == {(won, 200): 12, (1 - won, 409): 12}
    events = (await one.get(f"{agent}/events"))["data"]
    assert [event.get("input_kind") for event in events].count("interaction_response") == 1


async def test_one_result_per_call(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, _ = replicas
    agent = await one.agent(embed(call("look", {}), say("{{result 0}}")), source=TOOLS)
    await one.settled(agent, "waiting")
    (waiting,) = (await one.get(f"{agent}/tool-calls"))["data"]

    async def submit(number: int) -> Any:
        body = {"outcome": "succeeded", "content_blocks": [{"type": "text", "text": f"answer {number}"}]}
        return await replicas[number % 2].call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)

    answers = await asyncio.gather(*(submit(number) for number in range(20)))
    assert Counter(answer.status for answer in answers) == {201: 1, 409: 19}
    (winner,) = [answer.json["tool_result"]["content_blocks"][0]["text"] for answer in answers if answer.status == 201]
    assert (await one.settled(agent))["output"] == winner


async def test_one_agent_and_one_input_per_key(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, _ = replicas
    config = await one.config()
    headers = {"Idempotency-Key": "race"}

    async def launch(number: int) -> Any:
        body = {"config": config, "name": f"n{number}"}
        return await replicas[number % 2].call("POST", f"{one.scope}/agents", body, headers=headers)

    launched = await asyncio.gather(*(launch(number) for number in range(30)))
    assert Counter(answer.status for answer in launched) == {201: 1, 200: 29}
    assert len({answer.json["agent"]["id"] for answer in launched}) == 1
    agent = f"{one.scope}/agents/{launched[0].json['agent']['id']}"
    body = {"content_blocks": [{"type": "text", "text": "once"}]}
    sent = await asyncio.gather(
        *(replicas[n % 2].call("POST", f"{agent}/inputs", body, headers=headers) for n in range(30))
    )
    assert Counter(answer.status for answer in sent) == {201: 1, 200: 29}
    assert len({answer.json["agent_input"]["id"] for answer in sent}) == 1


async def test_archive_against_everything(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, two = replicas
    agent = await one.agent(embed(call("look", {}), say("x")), source=TOOLS)
    await one.settled(agent, "waiting")
    (waiting,) = (await one.get(f"{agent}/tool-calls"))["data"]
    body = {"outcome": "succeeded", "content_blocks": []}
    answers = await asyncio.gather(
        one.call("POST", f"{agent}/archive"),
        two.call("POST", f"{agent}/archive"),
        one.say(agent, "hi"),
        two.call("POST", f"{agent}/cancel"),
        two.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body),
        two.call("POST", f"/agents/{agent.rsplit('/', 1)[1]}/pause"),
    )
    assert all(answer.status in {200, 201, 409} for answer in answers), [answer.text for answer in answers]
    assert (answers[0].status, answers[1].status) == (200, 200)
    events = (await one.get(f"{agent}/events"))["data"]
    assert [event["event_kind"] for event in events].count("tool_result") == 1
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert (await one.get(f"/agents/{agent.rsplit('/', 1)[1]}"))["status"] == "archived"
