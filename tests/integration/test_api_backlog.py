"""The queue of waiting messages over HTTP, and pages of lists whose items go away. Source: field-reports B37."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import ModelServer, call, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests

TOOL = CONFIG + "tools: {look: {type: custom, description: L, input_schema: {type: object, properties: {}}}}\n"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def busy_agent(server: ApiServer, messages: int) -> tuple[str, list[str]]:
    """An agent that waits for a tool result, with messages behind it."""
    agent = await server.agent(embed(call("look", {}), say("after the tool")), source=TOOL)
    await server.settled(agent, "waiting")
    sent = [await server.say(agent, embed(say(f"answer {n}"))) for n in range(messages)]
    return agent, [answer.json["agent_input"]["id"] for answer in sent]


async def queue(server: ApiServer, agent: str) -> list[str]:
    return [item["id"] for item in (await server.get(f"{agent}/inputs/backlog"))["data"]]


async def act(server: ApiServer, agent: str, item: str, what: str, body: Any = None, **options: Any) -> int:
    answer = await server.call("POST", f"{agent}/inputs/{item}/{what}", body, **options)
    if answer.status == 200:
        assert answer.json == {"ok": True}
    return answer.status


async def answer_the_tool(server: ApiServer, agent: str) -> None:
    (waiting,) = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
    body = {"outcome": "succeeded", "content_blocks": []}
    assert (await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)).status == 201


async def test_rearranged_messages_run_in_their_new_order(server: ApiServer) -> None:
    agent, (a, b, c, d) = await busy_agent(server, 4)
    (first, *_) = (await server.get(f"{agent}/inputs/backlog"))["data"]
    assert (first["state"], first["delivery_mode"], first["input_kind"]) == ("received", "queued", "content")
    assert await act(server, agent, d, "move", {"position": "front"}) == 200
    assert await act(server, agent, a, "move", {"position": "after", "anchor_input_id": c}) == 200
    assert await queue(server, agent) == [d, b, c, a]
    assert await act(server, agent, b, "cancel") == 200
    assert await act(server, agent, a, "promote_to_steering", {}) == 200
    assert await act(server, agent, c, "promote_to_steering") == 200
    assert await act(server, agent, a, "demote_to_queued") == 200
    assert await queue(server, agent) == [d, a]
    await answer_the_tool(server, agent)
    await server.settled(agent)
    events = (await server.get(f"{agent}/events"))["data"]
    admitted = [event["agent_input_id"] for event in events if event.get("input_kind") == "content"]
    assert admitted[1:] == [c, d, a], "steering, then the queue"
    assert await queue(server, agent) == []
    for item in (a, b, c, d):
        assert await act(server, agent, item, "move", {"position": "back"}) == 409


async def test_promotion_with_open_questions(server: ApiServer) -> None:
    source = CONFIG + "tools: {ask_question: {}}\n"
    agent = await server.agent(
        embed(call("ask_question", {"questions": [{"prompt": "Blue?", "options": ["yes", "no"]}]})), source=source
    )
    await server.settled(agent, "waiting")
    item = (await server.say(agent, embed(say("moving on")))).json["agent_input"]["id"]
    assert await act(server, agent, item, "promote_to_steering", {"cancel_open_interactions": True}) == 200
    assert (await server.settled(agent))["output"] == "moving on"
    (form,) = (await server.get(f"{agent}/interactions"))["data"]
    assert form["state"] == "canceled"


async def test_requests_that_are_refused(server: ApiServer) -> None:
    agent, (a, b) = await busy_agent(server, 2)
    unknown = encode(IdKind.AGENT_INPUT, new_uuid())
    for item, what, body, status, code in (
        (unknown, "cancel", None, 404, "not_found"),
        (unknown, "move", {"position": "front"}, 404, "not_found"),
        ("ain_x", "cancel", None, 400, "validation_failed"),
        (a, "cancel", {}, 400, "validation_failed"),
        (a, "move", None, 400, "validation_failed"),
        (a, "move", {}, 400, "validation_failed"),
        (a, "move", {"position": "middle"}, 400, "validation_failed"),
        (a, "move", {"position": "before", "anchor_input_id": "ain_x"}, 400, "validation_failed"),
        (a, "move", {"position": "before"}, 400, "invalid_request"),
        (a, "move", {"position": "front", "anchor_input_id": b}, 400, "invalid_request"),
        (a, "move", {"position": "before", "anchor_input_id": a}, 409, "state_transition_conflict"),
        (a, "move", {"position": "before", "anchor_input_id": unknown}, 409, "state_transition_conflict"),
        (a, "promote_to_steering", {"cancel_open_interactions": "yes"}, 400, "validation_failed"),
        (a, "demote_to_queued", None, 409, "state_transition_conflict"),
    ):
        answer = await server.call("POST", f"{agent}/inputs/{item}/{what}", body)
        assert (answer.status, answer.code) == (status, code), (item, what, body)
    viewer, stranger = await server.user("viewer"), await server.user(None)
    assert await act(server, agent, a, "cancel", key=viewer) == 403
    assert await act(server, agent, a, "cancel", key=stranger) == 404
    assert (await server.call("GET", f"{agent}/inputs/backlog", key=viewer)).status == 200
    assert (await server.call("GET", f"{agent}/inputs/backlog", key=stranger)).status == 404
    assert await queue(server, agent) == [a, b]


async def test_pages_of_the_queue_whose_items_go_away(server: ApiServer) -> None:
    agent, items = await busy_agent(server, 5)
    other, _ = await busy_agent(server, 1)
    page = await server.get(f"{agent}/inputs/backlog?limit=2")
    cursor = page["next_cursor"]
    assert [item["id"] for item in page["data"]] == items[:2]
    assert await act(server, agent, items[1], "cancel") == 200
    page = await server.get(f"{agent}/inputs/backlog?limit=2&cursor={cursor}")
    assert [item["id"] for item in page["data"]] == items[2:4]
    for item in items[2:]:
        assert await act(server, agent, item, "cancel") == 200
    page = await server.get(f"{agent}/inputs/backlog?limit=2&cursor={cursor}")
    assert (page["data"], page["next_cursor"]) == ([], None)
    foreign = (await server.get(f"{server.scope}/agents?limit=1"))["next_cursor"]
    for wrong in (
        f"{agent}/inputs/backlog?cursor={foreign}",
        f"{agent}/inputs/backlog?cursor={cursor[:-4]}",
        f"{other}/inputs/backlog?cursor={cursor}",
        f"{server.scope}/agents?cursor={cursor}",
    ):
        answer = await server.call("GET", wrong)
        assert (answer.status, answer.code) == (400, "invalid_request")


async def test_pages_of_agents_that_are_archived_in_between(server: ApiServer) -> None:
    agents = [(await server.agent()).rsplit("/", 1)[1] for _ in range(5)][::-1]
    page = await server.get(f"{server.scope}/agents?limit=2")
    assert [item["id"] for item in page["data"]] == agents[:2]
    cursor = page["next_cursor"]
    assert (await server.call("POST", f"{server.scope}/agents/{agents[1]}/archive")).status == 200
    page = await server.get(f"{server.scope}/agents?limit=2&cursor={cursor}")
    assert [item["id"] for item in page["data"]] == agents[2:4]
    rest = (await server.get(f"{server.scope}/agents?limit=100"))["data"]
    for item in rest:
        await server.call("POST", f"{server.scope}/agents/{item['id']}/archive")
    page = await server.get(f"{server.scope}/agents?limit=2&cursor={cursor}")
    assert (page["data"], page["next_cursor"]) == ([], None)
