"""Organizations and projects over HTTP: who makes, sees and ends them, and what a repeated request does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from omnara.engine.emptying import empty_projects
from omnara.ids import IdKind, decode, encode, new_uuid
from tests.contract.server import ApiServer, api_server, invariants_hold
from tests.support.postgres import PostgresForTests

ORGS = "/api/v1/orgs"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running
        await invariants_hold(running)


async def test_a_new_organization_can_be_used_at_once(server: ApiServer) -> None:
    answer = await server.call("POST", ORGS, {"name": "Acme"})
    assert answer.status == 201, answer.text
    made = answer.json
    org, project = made["org"]["id"], made["project"]["id"]
    assert made["org"]["name"] == "Acme"
    assert made["project"]["name"] == "Default"
    assert made["project"]["org_id"] == org
    assert (made["membership"]["org_id"], made["membership"]["role"]) == (org, "owner")
    listed = await server.get(f"{ORGS}/{org}/projects")
    assert [item["id"] for item in listed["data"]] == [project]
    assert all(listed["data"][0]["access"].values())
    assert (await server.get(f"{ORGS}/{org}/projects/{project}/agents"))["data"] == []
    me = await server.get("/api/v1/me")
    assert (me["orgs"][0]["id"], me["orgs"][0]["role"]) == (org, "owner")


async def test_another_process_that_remembers_the_caller_looks_again(server: ApiServer) -> None:
    await server.get("/api/v1/me")
    org_id, owner = new_uuid(), decode(IdKind.USER, (await server.get("/api/v1/me"))["user"]["id"])
    await server.rows("insert into orgs (id, name) values ($1, 'Elsewhere')", org_id)
    await server.rows("insert into org_members values ($1, $2, 'owner')", org_id, owner)
    assert (await server.call("GET", f"{ORGS}/{encode(IdKind.ORG, org_id)}/projects")).status == 200


async def test_organizations_in_pages(server: ApiServer) -> None:
    for name in ("One", "Two", "Three"):
        assert (await server.call("POST", ORGS, {"name": name})).status == 201
    first = await server.get(f"{ORGS}?limit=2")
    assert [(org["name"], org["role"]) for org in first["data"]] == [("Three", "owner"), ("Two", "owner")]
    second = await server.get(f"{ORGS}?limit=100&cursor={first['next_cursor']}")
    assert second["data"][0]["name"] == "One"
    assert second["next_cursor"] is None
    assert (await server.call("GET", f"{ORGS}?cursor=x")).code == "invalid_request"


async def test_a_key_makes_one_organization(server: ApiServer) -> None:
    headers = {"Idempotency-Key": "org-1"}
    answers = await asyncio.gather(*(server.call("POST", ORGS, {"name": "Keyed"}, headers=headers) for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [200, 200, 200, 201]
    assert len({answer.text for answer in answers}) == 1
    assert decode(IdKind.ORG, answers[0].json["org"]["id"]).version == 8
    other = await server.call("POST", ORGS, {"name": "Other"}, headers=headers)
    assert (other.status, other.code) == (409, "idempotency_key_conflict")
    blank = await server.call("POST", ORGS, {"name": "X"}, headers={"Idempotency-Key": "  "})
    assert blank.status == 400
    org = answers[0].json["org"]["id"]
    assert (await server.call("DELETE", f"{ORGS}/{org}")).status == 204
    gone = await server.call("POST", ORGS, {"name": "Keyed"}, headers=headers)
    assert (gone.status, gone.code) == (409, "idempotency_key_conflict")


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb", "a\u0000b", "x" * 257])
async def test_names_that_nobody_could_read(server: ApiServer, name: str) -> None:
    for path in (ORGS, f"{ORGS}/{server.org}/projects"):
        assert (await server.call("POST", path, {"name": name})).status == 400


async def test_who_may_make_organizations_and_projects(server: ApiServer) -> None:
    member, key = await server.user("admin"), await server.org_key("admin")
    assert (await server.call("POST", ORGS, {"name": "X"}, key=key)).code == "forbidden"
    [listed] = (await server.get(ORGS, key=key))["data"]
    assert (listed["id"], listed["role"]) == (server.org, "member")
    for caller in (member, key):
        denied = await server.call("POST", f"{ORGS}/{server.org}/projects", {"name": "X"}, key=caller)
        assert (denied.status, denied.code) == (403, "forbidden")
        for path in (server.scope, f"{ORGS}/{server.org}"):
            assert (await server.call("DELETE", path, key=caller)).code == "forbidden"
    mine = (await server.call("POST", ORGS, {"name": "Private"})).json["org"]["id"]
    for method, path in (("POST", "/projects"), ("GET", "/projects"), ("DELETE", "")):
        body = {"name": "X"} if method == "POST" else None
        hidden = await server.call(method, f"{ORGS}/{mine}{path}", body, key=member)
        assert (hidden.status, hidden.code) == (404, "not_found")


async def test_projects_have_one_name_and_one_key_each(server: ApiServer) -> None:
    path = f"{ORGS}/{server.org}/projects"
    headers = {"Idempotency-Key": "project-1"}
    made = await server.call("POST", path, {"name": "Alpha"}, headers=headers)
    assert made.status == 201, made.text
    again = await server.call("POST", path, {"name": "Alpha"}, headers=headers)
    assert (again.status, again.json) == (200, made.json)
    for body, extra in (({"name": "Beta"}, headers), ({"name": "Alpha"}, {})):
        clash = await server.call("POST", path, body, headers=extra)
        assert (clash.status, clash.code) == (409, "idempotency_key_conflict")
    project = f"{path}/{made.json['id']}"
    assert (await server.get(f"{project}/agents"))["data"] == []
    assert (await server.call("DELETE", project)).status == 204
    assert (await server.call("DELETE", project)).code == "not_found"
    assert (await server.call("GET", f"{project}/agents")).status == 404
    deleted = await server.call("POST", path, {"name": "Alpha"}, headers=headers)
    assert (deleted.status, deleted.code) == (409, "idempotency_key_conflict")
    assert (await server.call("POST", path, {"name": "Alpha"})).status == 201, "the name is free again"


async def test_parallel_projects_of_one_name(server: ApiServer) -> None:
    path = f"{ORGS}/{server.org}/projects"
    answers = await asyncio.gather(*(server.call("POST", path, {"name": "Race"}) for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [201, 409, 409, 409]


async def test_deleting_stops_every_agent(server: ApiServer) -> None:
    """The environment's models are there in a new project of the organization, so an agent can be launched."""
    path = f"{ORGS}/{server.org}/projects"
    project = (await server.call("POST", path, {"name": "Doomed"})).json["id"]
    before, server.project = server.project, project
    try:
        agents = [await server.agent("hello") for _ in range(3)]
    finally:
        server.project = before
    assert (await server.call("DELETE", f"{path}/{project}")).status == 204
    assert await empty_projects(server.deps), "as a process with a worker does within seconds"
    ids = [decode(IdKind.AGENT, agent.rsplit("/", 1)[1]) for agent in agents]
    gates = await server.rows("select gate from agent_sched where agent_id = any($1::uuid[])", ids)
    assert [row["gate"] for row in gates] == ["archived"] * 3
    waiting = await server.rows("select 1 from inputs where agent_id = any($1) and state = 'received'", ids)
    assert waiting == []
    grants = await server.rows(
        "select 1 from project_model_grants where project_id = $1", decode(IdKind.PROJECT, project)
    )
    assert grants == []
    assert (await server.call("GET", agents[0])).status == 404


async def test_the_overview_shows_what_the_caller_sees(server: ApiServer) -> None:
    org = (await server.call("POST", ORGS, {"name": "Overview"})).json
    found = await server.get(f"{ORGS}/{org['org']['id']}/overview")
    assert [project["id"] for project in found["projects"]] == [org["project"]["id"]]
    assert (found["recent_agents"], found["recent_agent_profiles"]) == ([], [])
    agents = [(await server.agent()).rsplit("/", 1)[1] for _ in range(6)]
    recent = (await server.get(f"{ORGS}/{server.org}/overview"))["recent_agents"]
    assert [agent["id"] for agent in recent] == agents[:0:-1]
    outsider = await server.user(None)
    nothing = await server.get(f"{ORGS}/{server.org}/overview", key=outsider)
    assert (nothing["projects"], nothing["recent_agents"]) == ([], [])
    assert (await server.call("GET", f"{ORGS}/{org['org']['id']}/overview", key=outsider)).code == "not_found"


async def test_deleting_an_organization_ends_everything_in_it(server: ApiServer) -> None:
    made = (await server.call("POST", ORGS, {"name": "Short-lived"})).json
    org = made["org"]["id"]
    assert (await server.call("POST", f"{ORGS}/{org}/projects", {"name": "Second"})).status == 201
    assert (await server.call("DELETE", f"{ORGS}/{org}")).status == 204
    assert (await server.call("DELETE", f"{ORGS}/{org}")).status == 404
    assert (await server.call("GET", f"{ORGS}/{org}/projects")).status == 404
    assert org not in [item["id"] for item in (await server.get(ORGS))["data"]]
    assert org not in [item["id"] for item in (await server.get("/api/v1/me"))["orgs"]]
    left = await server.rows("select 1 from projects where org_id = $1 and deleted_at is null", decode(IdKind.ORG, org))
    assert left == []
