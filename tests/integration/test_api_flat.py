"""The flat routes: one request launches, one lists, one looks, three steer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import ModelServer, call, embed, embedded, say
from tests.contract.server import ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests

LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
BODY: dict[str, Any] = {"system_prompt": "Be brief.", "model": "claude-sonnet-4-6"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def launch(server: ApiServer, **more: Any) -> Any:
    answer = await server.call("POST", "/agents", BODY | more)
    assert answer.status == 201, answer.text
    return answer.json


async def test_launch_look_and_follow_the_links(server: ApiServer) -> None:
    made = await launch(
        server, message=embed(say("Hello!")), name="Flat", temperature=0.5, tools=["ask_question", LOOK]
    )
    agent = made["links"]["events"].removesuffix("/events")
    done = await server.settled(agent)
    assert done["output"] == "Hello!"
    assert (done["name"], done["temperature"], done["system_prompt"]) == ("Flat", 0.5, "Be brief.")
    assert done["next_action"] == "input"
    assert (done["last_step"]["kind"], done["last_step"]["status"]) == ("model", "succeeded")
    assert done["usage"]["output_tokens_total"] > 0
    assert done["links"] == made["links"]
    for name in ("events", "tool_calls", "interactions"):
        await server.get(made["links"][name])
    sent = await server.call(
        "POST", made["links"]["inputs"], {"content_blocks": [{"type": "text", "text": embed(say("Again."))}]}
    )
    assert sent.status == 201
    scoped = await server.get(agent)
    assert scoped["agent"]["name"] == "Flat"


async def test_the_same_key_launches_once(server: ApiServer) -> None:
    headers = {"Idempotency-Key": "flat-1"}
    first = await server.call("POST", "/agents", BODY, headers=headers)
    again = await server.call("POST", "/agents", BODY | {"system_prompt": "Other."}, headers=headers)
    assert (first.status, again.status) == (201, 200)
    assert first.json == again.json


@pytest.mark.parametrize("name", ["claude-sonnet-4-6", "anthropic/claude-sonnet-4-6", "anthropic/some-new-model"])
async def test_names_of_models(server: ApiServer, name: str) -> None:
    made = await launch(server, model=name)
    assert (await server.get(f"/agents/{made['id']}"))["model"] == name.removeprefix("anthropic/")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"system_prompt": ""}, "validation_failed"),
        ({"system_prompt": None}, "validation_failed"),
        ({"model": "no-such-model"}, "invalid_request"),
        ({"model": "nobody/x"}, "invalid_request"),
        ({"tools": ["no_such_tool"]}, "invalid_request"),
        ({"tools": [LOOK, LOOK]}, "invalid_request"),
        ({"tools": [LOOK | {"permission": "maybe"}]}, "validation_failed"),
        ({"tools": [LOOK | {"extra": 1}]}, "validation_failed"),
        ({"tools": [LOOK | {"name": "not a name"}]}, "invalid_request"),
        ({"tools": [LOOK | {"input_schema": {"type": "string"}}]}, "invalid_request"),
        ({"tools": "look"}, "validation_failed"),
        ({"temperature": 3}, "validation_failed"),
        ({"temperature": -1}, "validation_failed"),
        ({"temperature": "hot"}, "validation_failed"),
        ({"message": "  "}, "invalid_request"),
        ({"system_prompt": " \n "}, "invalid_request"),
        ({"name": "a\nagt_forged  idle"}, "invalid_request"),
        ({"name": "\x1b]52;c;ZXZpbA==\x07"}, "invalid_request"),
        ({"name": "\x9b2J"}, "invalid_request"),
        ({"unknown": 1}, "validation_failed"),
    ],
)
async def test_launch_refusals(server: ApiServer, change: dict[str, Any], code: str) -> None:
    answer = await server.call("POST", "/agents", BODY | change)
    assert (answer.status, answer.code) == (400, code), answer.text


async def test_pause_holds_and_resume_goes_on(server: ApiServer) -> None:
    made = await launch(server, tools=[LOOK])
    agent = made["links"]["events"].removesuffix("/events")
    paused = await server.call("POST", f"/agents/{made['id']}/pause")
    assert (paused.status, paused.json["status"], paused.json["next_action"]) == (200, "paused", "resume")
    again = await server.call("POST", f"/agents/{made['id']}/pause")
    assert again.status == 200
    assert (await server.say(agent, embed(call("look", {}), say("seen")))).status == 201, "inputs are still accepted"
    assert (await server.get(f"/agents/{made['id']}"))["status"] == "paused"
    assert (await server.call("POST", f"/agents/{made['id']}/resume")).status == 200
    await server.settled(agent, "waiting")
    await server.call("POST", f"/agents/{made['id']}/pause")
    (waiting,) = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
    body = {"outcome": "succeeded", "content_blocks": []}
    done = await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
    assert done.status == 201, "results are still accepted"
    assert (await server.get(f"/agents/{made['id']}"))["status"] == "paused"
    await server.call("POST", f"/agents/{made['id']}/resume", {})
    assert (await server.settled(agent))["output"] == "seen"


async def test_a_crashed_agent_needs_a_word(server: ApiServer) -> None:
    made = await launch(server, message=embed(say("ok")))
    agent = made["links"]["events"].removesuffix("/events")
    await server.settled(agent)
    await server.rows(
        "update agent_sched set gate = 'crashed', deaths = 5 where agent_id = "
        "(select id from agents order by created_at desc limit 1)"
    )
    crashed = await server.get(f"/agents/{made['id']}")
    assert (crashed["status"], crashed["next_action"]) == ("crashed", "operator")
    assert "5 workers" in crashed["diagnosis"]
    refused = await server.call("POST", f"/agents/{made['id']}/resume")
    assert (refused.status, refused.code) == (409, "state_transition_conflict")
    assert crashed["diagnosis"] in refused.json["error"]
    both = await server.call("POST", f"/agents/{made['id']}/resume", {"force": True, "restart": True})
    assert (both.status, both.code) == (400, "invalid_request")
    forced = await server.call("POST", f"/agents/{made['id']}/resume", {"force": True})
    assert forced.status == 200, forced.text
    await server.settled(agent)


async def test_delete_archives(server: ApiServer) -> None:
    made = await launch(server)
    for _ in range(2):
        gone = await server.call("DELETE", f"/agents/{made['id']}")
        assert (gone.status, gone.json["status"], gone.json["next_action"]) == (200, "archived", "none")
    resumed = await server.call("POST", f"/agents/{made['id']}/resume")
    assert (resumed.status, resumed.code) == (409, "state_transition_conflict")


async def test_other_peoples_agents_do_not_exist(server: ApiServer) -> None:
    made = await launch(server)
    stranger = await server.user(None)
    for method, path in (("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("DELETE", "")):
        answer = await server.call(method, f"/agents/{made['id']}{path}", key=stranger)
        assert (answer.status, answer.code) == (404, "not_found")
    missing = await server.call("GET", f"/agents/{encode(IdKind.AGENT, new_uuid())}")
    assert missing.status == 404
    refused = await server.call("POST", "/agents", BODY, key=stranger)
    assert (refused.status, refused.code) == (403, "forbidden"), "without a project there is nowhere to launch"


@pytest.mark.parametrize("name", ["read_file", "web_fetch", "ask_question"])
async def test_a_tool_named_like_a_built_in_one_is_refused_with_another_name(
    server: ApiServer, name: str
) -> None:
    refused = await server.call("POST", "/agents", BODY | {"tools": [LOOK | {"name": name}]})
    assert refused.status == 400
    assert f"give yours another name, such as my_{name}" in refused.text
    assert await launch(server, tools=[LOOK | {"name": f"my_{name}"}])


# --- the list ---------------------------------------------------------------------------------------------


async def pages(server: ApiServer, query: str) -> list[list[str]]:
    """The ids of each page."""
    found: list[list[str]] = []
    cursor = ""
    while True:
        page = await server.get(f"/agents?{query}{cursor}")
        found.append([agent["id"] for agent in page["data"]])
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


async def test_agents_are_listed_by_status_page_by_page(server: ApiServer) -> None:
    made = [(await launch(server, name=f"listed {number}"))["id"] for number in range(7)]
    for agent in made[:5]:
        assert (await server.call("POST", f"/agents/{agent}/pause")).status == 200
    assert (await server.call("DELETE", f"/agents/{made[0]}")).status == 200
    assert await pages(server, "status=paused&limit=2") == [[made[4], made[3]], [made[2], made[1]]]
    assert made[0] in [agent for page in await pages(server, "status=archived&limit=3") for agent in page]
    everyone = [agent for page in await pages(server, "limit=3") for agent in page]
    assert everyone[:6] == made[:0:-1]
    assert len(everyone) == len(set(everyone))
    one = (await server.get("/agents?status=paused&limit=1"))["data"][0]
    alone = await server.get(f"/agents/{made[4]}")
    same = ("id", "name", "status", "model", "links", "created_at")
    assert {name: one[name] for name in same} == {name: alone[name] for name in same}


@pytest.mark.parametrize("query", ["status=bogus", "limit=0", "limit=101", "cursor=x", "sort=name", "status="])
async def test_bad_queries_of_the_list_are_refused(server: ApiServer, query: str) -> None:
    refused = await server.call("GET", f"/agents?{query}")
    code = "invalid_request" if query == "cursor=x" else "validation_failed"
    assert (refused.status, refused.code) == (400, code)


async def test_a_cursor_is_of_its_status(server: ApiServer) -> None:
    for _ in range(2):
        agent = (await launch(server))["id"]
        await server.call("POST", f"/agents/{agent}/pause")
    cursor = (await server.get("/agents?status=paused&limit=1"))["next_cursor"]
    refused = await server.call("GET", f"/agents?status=idle&limit=1&cursor={cursor}")
    assert (refused.status, refused.code) == (400, "invalid_request")


async def test_the_client_asks_once_per_page(server: ApiServer) -> None:
    from omnara.client import Client

    made = [(await launch(server))["id"] for _ in range(3)]
    for agent in made:
        assert (await server.call("DELETE", f"/agents/{agent}")).status == 200
    async with Client(server.url, server.key) as client:
        asked: list[tuple[str, str]] = []
        request = client._http.request

        async def counted(method: str, path: str, *rest: Any, **options: Any) -> Any:
            asked.append((method, path))
            return await request(method, path, *rest, **options)

        client._http.request = counted  # type: ignore[method-assign]
        found = await client.agents(status="archived")
        assert [agent.id for agent in found][:3] == made[::-1]
        assert asked == [("GET", "/agents")]
        assert made[0] not in [agent.id for agent in await client.agents()]
        await client.links(made[0])
        assert asked == [("GET", "/agents"), ("GET", "/agents")], "the list told the links"
