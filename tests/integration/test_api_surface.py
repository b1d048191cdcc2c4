"""The scoped contract over HTTP: every route, on a real database, with workers and a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import ModelServer, embedded
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests

TOOLS = (
    CONFIG
    + """tools:
  look:
    type: custom
    description: Looks.
    input_schema: {type: object, properties: {path: {type: string}}, required: [path]}
  risky:
    type: custom
    description: Is risky.
    input_schema: {type: object, properties: {}}
    permission: {mode: always_ask}
  ask_question: {}
"""
)
QUESTION = {"questions": [{"question": "Which?", "options": [{"label": "A"}, {"label": "B"}]}]}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


# --- account ----------------------------------------------------------------------------------------------


async def test_me_is_for_users(server: ApiServer) -> None:
    me = await server.get("/api/v1/me")
    assert me["orgs"][0]["id"] == server.org
    refused = await server.call("GET", "/api/v1/me", key=await server.org_key())
    assert (refused.status, refused.code) == (403, "forbidden")


async def test_projects_are_paged_newest_first(server: ApiServer) -> None:
    user = (await server.rows("select user_id from org_members where role = 'owner'"))[0]["user_id"]
    org = (await server.rows("select id from orgs"))[0]["id"]
    for name in ("one", "two", "three"):
        project = new_uuid()
        await server.rows("insert into projects (id, org_id, name) values ($1, $2, $3)", project, org, name)
        await server.rows("insert into project_members values ($1, $2, 'viewer')", project, user)
    server_key_before = await server.call("GET", f"/api/v1/orgs/{server.org}/projects?limit=100")
    names: list[str] = []
    path = f"/api/v1/orgs/{server.org}/projects?limit=2"
    page: dict[str, Any] = {"next_cursor": ""}
    query = ""
    while page["next_cursor"] is not None:
        page = await server.get(path + query)
        names += [project["name"] for project in page["data"]]
        query = f"&cursor={page['next_cursor']}"
    assert len(names) == len(set(names))
    assert names == [project["name"] for project in server_key_before.json["data"]]
    assert names[-1] == "Default"


async def test_tool_catalog_lists_built_in_tools(server: ApiServer) -> None:
    catalog = await server.get("/api/v1/tool-catalog")
    names = [tool["name"] for tool in catalog["built_in_tools"]]
    assert names == sorted(names)
    assert {"ask_question", "web_fetch"} <= set(names)


# --- configs ----------------------------------------------------------------------------------------------


async def test_configs_are_deduplicated_by_words(server: ApiServer) -> None:
    path = f"{server.scope}/agent-configs"
    source = CONFIG.replace("Be brief.", "Be unique.")
    first = await server.call("POST", path, {"source": source, "source_format": "yaml"})
    again = await server.call("POST", path, {"source": source, "source_format": "yaml"})
    other = await server.call("POST", path, {"source": source + "\n\n", "source_format": "yaml"})
    assert (first.status, again.status, other.status) == (201, 200, 201)
    assert first.json == again.json
    assert other.json["id"] != first.json["id"]
    assert other.json["effective_definition_hash"] == first.json["effective_definition_hash"]
    assert await server.get(f"{path}/{first.json['id']}") == first.json
    as_json = '{"instruction": "Be unique.", "model": {"provider_config": "anthropic", "name": "claude-sonnet-4-6"}}'
    third = await server.call("POST", path, {"source": as_json, "source_format": "json"})
    assert third.json["effective_definition_hash"] == first.json["effective_definition_hash"]


@pytest.mark.parametrize("source", ["a: [", "instruction: x", CONFIG + "nonsense: 1\n", CONFIG.replace("claude", "x")])
async def test_bad_configs_are_invalid_requests(server: ApiServer, source: str) -> None:
    answer = await server.call("POST", f"{server.scope}/agent-configs", {"source": source, "source_format": "yaml"})
    assert (answer.status, answer.code) == (400, "invalid_request")


# --- agents -----------------------------------------------------------------------------------------------


async def test_launch_once_per_key(server: ApiServer) -> None:
    path = f"{server.scope}/agents"
    body = {"config": await server.config(), "name": "Keyed"}
    headers = {"Idempotency-Key": "launch-1"}
    first = await server.call("POST", path, body, headers=headers)
    again = await server.call("POST", path, body | {"name": "Other"}, headers=headers)
    assert (first.status, again.status) == (201, 200)
    assert set(again.json) == {"agent"}
    assert again.json["agent"]["id"] == first.json["agent"]["id"]
    assert again.json["agent"]["name"] == "Keyed"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"config": encode(IdKind.AGENT_CONFIG, new_uuid())}, 404),
        ({"profile": encode(IdKind.AGENT_PROFILE, new_uuid())}, 404),
        ({"config": "acfg_" + "a" * 25 + "b"}, 400),
        ({"message": "   "}, 400),
        ({"name": "a\nagt_forged  idle"}, 400),
        ({"name": "\x1b[2J"}, 400),
    ],
)
async def test_launch_refusals(server: ApiServer, change: dict[str, Any], status: int) -> None:
    answer = await server.call("POST", f"{server.scope}/agents", {"config": await server.config()} | change)
    assert answer.status == status, answer.text


async def test_agents_are_listed_sorted_filtered_and_paged(server: ApiServer) -> None:
    config = await server.config()
    for name in ("zeta list", "alpha list", "Beta list", "long " + "ü" * 240 + " list"):
        made = await server.call("POST", f"{server.scope}/agents", {"config": config, "name": name})
        assert made.status == 201
    for sort in ("name", "-name", "created_at", "-created_at", "updated_at", "-updated_at"):
        whole = await server.get(f"{server.scope}/agents?name=*list&sort={sort}&limit=100")
        expected = [agent["id"] for agent in whole["data"]]
        assert len(expected) == 4
        found, query = [], ""
        for _ in range(4):
            page = await server.get(f"{server.scope}/agents?name=*list&sort={sort}&limit=1{query}")
            found += [agent["id"] for agent in page["data"]]
            query = f"&cursor={page['next_cursor']}"
        assert found == expected, sort
        assert page["next_cursor"] is None
    assert (await server.get(f"{server.scope}/agents?name=ALPHA*"))["data"][0]["name"] == "alpha list"
    profile = encode(IdKind.AGENT_PROFILE, new_uuid())
    assert (await server.get(f"{server.scope}/agents?agent_profile_id={profile}"))["data"] == []


async def test_a_cursor_belongs_to_its_list(server: ApiServer) -> None:
    for _ in range(2):
        await server.agent()
    cursor = (await server.get(f"{server.scope}/agents?limit=1"))["next_cursor"]
    assert (await server.call("GET", f"{server.scope}/agents?limit=2&cursor={cursor}")).status == 200
    agent = await server.agent()
    for path in (
        f"{server.scope}/agents?sort=name&cursor={cursor}",
        f"{server.scope}/agents?name=a*&cursor={cursor}",
        f"/api/v1/orgs/{server.org}/projects?cursor={cursor}",
        f"{agent}/tool-calls?cursor={cursor}",
        f"{agent}/interactions?cursor={cursor}",
        f"{server.scope}/agents?cursor={cursor[:-4]}",
        f"{server.scope}/agents?cursor=*",
        f"{server.scope}/agents?cursor=",
        f"{server.scope}/agents?cursor=e30",
    ):
        answer = await server.call("GET", path)
        assert (answer.status, answer.code) == (400, "invalid_request"), path


async def test_archive_hides_and_keeps(server: ApiServer) -> None:
    agent = await server.agent()
    first = await server.call("POST", f"{agent}/archive")
    again = await server.call("POST", f"{agent}/archive")
    assert (first.status, again.status) == (200, 200)
    assert first.json == again.json
    assert first.json["agent"]["state"] == "archived"
    listed = await server.get(f"{server.scope}/agents?limit=100")
    assert first.json["agent"]["id"] not in [one["id"] for one in listed["data"]]
    assert (await server.get(agent))["agent"]["archived_at"] == first.json["agent"]["archived_at"]
    late = await server.say(agent, "hello?")
    assert (late.status, late.code) == (409, "state_transition_conflict")
