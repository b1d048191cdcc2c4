"""Every operation of the API, asked by people from elsewhere: what they may not see does not exist, by any path to it.

The operations come from the served routes, so a new one is asked too. Source: field-reports B15, B19, B37; api.md §3.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from omnara.access import tokens
from omnara.access.roles import CallerRule
from omnara.access.tokens import TokenKind
from omnara.api.openapi import ROUTES
from omnara.api.routing import Route
from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import Answer, Call, ModelServer, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, insert_token, invariants_hold, model_server
from tests.support.pictures import block, png
from tests.support.postgres import PostgresForTests

TOOLS = """tools:
  ask_question: {}
  look: {type: custom, description: L, input_schema: {type: object}}
"""
QUESTION = {"questions": [{"prompt": "Which?", "options": ["A", "B"]}]}
GENERIC = {"kind": "generic", "value": "a secret of somebody"}
POOL = {
    "name": "pool",
    "provider": "docker",
    "max_total_machines": 2,
    "provider_config": {"image": "omnara/sandbox"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running
        await invariants_hold(running)


async def made(server: ApiServer, path: str, body: Any) -> Any:
    answer = await server.call("POST", path, body)
    assert answer.status in {200, 201}, answer.text
    return answer.json


async def machines(server: ApiServer) -> dict[str, str]:
    """A machine, a pool, and what belongs to them, by the names of parameters."""
    org = f"/api/v1/orgs/{server.org}"
    connected = {"display_name": "box", "project_ids": [server.project]}
    machine = await made(server, f"{org}/machines/connect", connected)
    pool = await made(server, f"{org}/machine-pools", POOL)
    granted = await made(server, f"{server.scope}/machine-pool-grants", {"machine_pool_id": pool["id"]})
    return {
        "machineID": machine["machine"]["id"],
        "daemonTokenID": machine["token_record"]["id"],
        "machineGrantID": machine["project_grants"][0]["id"],
        "poolID": pool["id"],
        "poolGrantID": granted["id"],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def theirs(server: ApiServer) -> dict[str, str]:
    """One of each kind of thing that a path can name, by the name of its parameter."""
    org = f"/api/v1/orgs/{server.org}"
    asked = Answer(blocks=(Call("ask_question", QUESTION), Call("look", {})))
    agent = await server.agent(embed(asked, say("fine")), source=CONFIG + TOOLS)
    await server.settled(agent, "waiting")
    sent = (await made(server, f"{agent}/inputs", {"content_blocks": [block(png())]}))["agent_input"]
    secret = await made(server, f"{org}/secrets", {"owner": {"kind": "org"}, "name": "one", "material": GENERIC})
    grant = await made(server, f"{org}/secrets/{secret['id']}/grants", {"target_project_id": server.project})
    provider = (await server.get(f"{org}/model-provider-configs"))["data"][0]
    models = (await server.get(f"{org}/model-provider-configs/{provider['id']}/models"))["data"]
    [granted, *_] = (await server.get(f"{server.scope}/model-grants"))["data"]
    member = await server.get("/api/v1/me", key=await server.user())
    await server.org_key()
    [key, *_] = (await server.get(f"{org}/api-keys"))["data"]
    [token, *_] = (await server.get("/api/v1/personal-access-tokens"))["data"]
    return await machines(server) | {
        "orgID": server.org,
        "projectID": server.project,
        "agentID": agent.rpartition("/")[2],
        "id": agent.rpartition("/")[2],
        "agentConfigID": await server.config(),
        "inputID": sent["id"],
        "artifactID": sent["content_blocks"][0]["artifact_id"],
        "toolCallID": (await server.get(f"{agent}/tool-calls?state=ready&type=custom"))["data"][0]["id"],
        "interactionID": (await server.get(f"{agent}/interactions"))["data"][0]["id"],
        "turnID": (await server.get(f"{agent}/turns"))["data"][0]["id"],
        "secretID": secret["id"],
        "grantID": grant["id"],
        "modelProviderConfigID": provider["id"],
        "configuredModelID": models[0]["id"],
        "modelGrantID": granted["grant"]["id"],
        "userID": member["user"]["id"],
        "keyID": key["id"],
        "tokenID": token["id"],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elsewhere(server: ApiServer, model: ModelServer) -> tuple[ApiServer, dict[str, str]]:
    """The owner of another organization, as a client of the same server, with an agent of their own."""
    other, user = copy.copy(server), new_uuid()
    other.key = tokens.generate(TokenKind.PERSONAL).text
    async with server.deps.db.transaction() as connection:
        await connection.execute("insert into users (id, display_name) values ($1, 'Elsewhere')", user)
        await insert_token(connection, user, other.key)
    other.org = (await made(other, "/api/v1/orgs", {"name": "Elsewhere"}))["org"]["id"]
    org = f"/api/v1/orgs/{other.org}"
    other.project = (await made(other, f"{org}/projects", {"name": "Elsewhere"}))["id"]
    secret = await made(other, f"{org}/secrets", {"owner": {"kind": "org"}, "name": "key", "material": GENERIC})
    provider = {"name": "anthropic", "preset": "anthropic", "credential_secret_id": secret["id"]}
    config = (await made(other, f"{org}/model-provider-configs", provider))["config"]
    facts = {"name": "claude-sonnet-4-6", "provider_model_slug": "x", "context_window_tokens": 100_000}
    made_model = await made(other, f"{org}/model-provider-configs/{config['id']}/models", facts)
    await made(other, f"{other.scope}/model-grants", {"configured_model_id": made_model["id"]})
    agent = await other.agent()
    return other, await machines(other) | {
        "orgID": other.org,
        "projectID": other.project,
        "agentID": agent.rpartition("/")[2],
        "secretID": secret["id"],
        "modelProviderConfigID": config["id"],
    }


def body_for(route: Route, ids: Mapping[str, str]) -> Any:
    """A body that the operation would take from somebody who may do it."""
    text = {"type": "text", "text": "x"}
    source = {"source": CONFIG, "source_format": "yaml"}
    endpoint = {"name": "x", "preset": "anthropic", "credential_secret_id": ids["secretID"]}
    sizes = {"provider_model_slug": "x", "context_window_tokens": 100_000}
    return {
        "createProject": {"name": "x"},
        "createSecret": {"owner": {"kind": "org"}, "name": "x", "material": GENERIC},
        "updateSecret": {"name": "x"},
        "createSecretVersion": {"material": GENERIC},
        "createSecretGrant": {"target_project_id": ids["projectID"]},
        "createModelProviderConfig": endpoint,
        "updateModelProviderConfig": {"request_timeout_ms": 1_000},
        "createConfiguredModel": {"name": "x", **sizes},
        "updateConfiguredModel": {"name": "x"},
        "createProjectModelGrant": {"configured_model_id": ids["configuredModelID"]},
        "updateProjectModelGrant": {"context_window_tokens": 1_000},
        "updateOrgMember": {"role": "member"},
        "setMemberProjectAccess": {"role": "viewer"},
        "createMachine": {"display_name": "x"},
        "connectBYOMachine": {"display_name": "x", "project_ids": [ids["projectID"]]},
        "updateMachine": {"cwd": "/x"},
        "createMachinePool": POOL | {"name": "x"},
        "updateMachinePool": {"name": "x"},
        "createProjectMachineGrant": {"machine_id": ids["machineID"]},
        "createProjectMachinePoolGrant": {"machine_pool_id": ids["poolID"]},
        "updateProjectMachinePoolGrant": {"description": "x"},
        "createOrgAPIKey": {"name": "x", "org_role": "member"},
        "updateOrgAPIKey": {"name": "x"},
        "setOrgAPIKeyProjectRole": {"role": "viewer"},
        "createAgentConfig": source,
        "updateAgentConfig": source,
        "createAgent": {"config": ids["agentConfigID"]},
        "createAgentInput": {"content_blocks": [text]},
        "moveQueuedBacklogInput": {"position": "front"},
        "submitToolCallResult": {"outcome": "succeeded", "content_blocks": [text]},
        "resolveAgentInteraction": {"answers": [{"option_indices": [0]}]},
    }.get(route.operation_id)


KINDS_OF_THEIR_OWN = {IdKind.MACHINE_GRANT: "machineGrantID", IdKind.DAEMON_TOKEN: "daemonTokenID"}
"""Whose parameters have the names of others."""


def named(route: Route) -> dict[str, IdKind]:
    """What the path of an operation names, each kind under a name of its own."""
    return {KINDS_OF_THEIR_OWN.get(kind, name): kind for name, kind in route.path_ids.items()}


def filled(route: Route, ids: Mapping[str, str]) -> str:
    path = route.path
    for parameter, name in zip(route.path_ids, named(route), strict=True):
        path = path.replace("{" + parameter + "}", ids[name])
    return path


PEOPLES = [route for route in ROUTES if not route.daemon]
NAMING = [route for route in PEOPLES if route.path_ids]


def mixtures(route: Route, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Paths that lead to something of theirs: by their own path, or below things of ours that exist."""
    names = list(named(route))
    yield {name: theirs[name] for name in names}
    for length in range(1, len(names)):
        if all(name in ours for name in names[:length]):
            yield {name: ours[name] if name in names[:length] else theirs[name] for name in names}


async def digest(server: ApiServer) -> dict[str, str]:
    """All rows of all tables, in short; without the leases of processes."""
    tables = await server.rows(
        "select quote_ident(tablename) from pg_tables where schemaname = 'public' and tablename <> 'workers'"
    )
    found = {}
    for [table] in tables:
        [row] = await server.rows(f"select md5(string_agg(t::text, '' order by t::text)) from {table} t")
        found[table] = row[0]
    return found


async def test_what_is_somebody_elses_is_as_what_is_nowhere(
    server: ApiServer, theirs: dict[str, str], elsewhere: tuple[ApiServer, dict[str, str]]
) -> None:
    """404 in the same words as for an id that nobody has, and nothing is written."""
    other, ours = elsewhere
    await other.get("/api/v1/me")  # notes that the key is used
    before = await digest(server)
    wrong = []
    for route in NAMING:
        nowhere = {name: encode(kind, new_uuid()) for name, kind in named(route).items()}
        expected = (403, "forbidden") if route.caller is CallerRule.SESSION else (404, "not_found")
        body = body_for(route, theirs)
        for ids in mixtures(route, ours, theirs):
            unknown = {name: value if value == ours.get(name) else nowhere[name] for name, value in ids.items()}
            answer = await other.call(route.method, filled(route, ids), body)
            missing = await other.call(route.method, filled(route, unknown), body)
            if (answer.status, answer.code) != expected or missing.text != answer.text:
                wrong.append((route.operation_id, ids, answer.text, missing.text))
    assert wrong == []
    assert await digest(server) == before


async def test_bodies_do_not_reach_what_paths_do_not(
    server: ApiServer, theirs: dict[str, str], elsewhere: tuple[ApiServer, dict[str, str]]
) -> None:
    """Things of their own, made out of somebody else's: refused in the same words as what nobody has."""
    other, ours = elsewhere
    org = f"/api/v1/orgs/{other.org}"
    provider = f"{org}/model-provider-configs/{ours['modelProviderConfigID']}"

    def reaching(ids: Mapping[str, str]) -> list[tuple[str, str, Any]]:
        endpoint = {"name": "taken", "preset": "openai", "credential_secret_id": ids["secretID"]}
        owner = {"kind": "project", "project_id": ids["projectID"]}
        return [
            ("POST", f"{org}/model-provider-configs", endpoint),
            ("PUT", provider, {"credential_secret_id": ids["secretID"]}),
            ("POST", f"{org}/secrets/{ours['secretID']}/grants", {"target_project_id": ids["projectID"]}),
            ("POST", f"{org}/secrets", {"owner": owner, "name": "x", "material": GENERIC}),
            ("POST", f"{other.scope}/model-grants", {"configured_model_id": ids["configuredModelID"]}),
            ("POST", f"{other.scope}/machine-grants", {"machine_id": ids["machineID"]}),
            ("POST", f"{other.scope}/machine-pool-grants", {"machine_pool_id": ids["poolID"]}),
            ("POST", f"{org}/machines", {"display_name": "x", "secret_env": {"A": ids["secretID"]}}),
            ("POST", f"{org}/machines/connect", {"display_name": "x", "project_ids": [ids["projectID"]]}),
            ("PATCH", f"{org}/machines/{ours['machineID']}", {"secret_env": {"A": ids["secretID"]}}),
            ("POST", f"{org}/machine-pools", POOL | {"default_machine_secret_env": {"A": ids["secretID"]}}),
            ("PUT", f"{org}/machine-pools/{ours['poolID']}", {"provider_auth_secret_id": ids["secretID"]}),
            (
                "PATCH",
                f"{other.scope}/machine-pool-grants/{ours['poolGrantID']}",
                {"default_machine_secret_env_overlay": {"A": ids["secretID"]}},
            ),
            ("POST", f"{other.scope}/agents", {"config": ids["agentConfigID"]}),
        ]

    kinds = {name: kind for route in NAMING for name, kind in named(route).items()}
    nowhere = {name: encode(kind, new_uuid()) for name, kind in kinds.items()}
    before = await digest(server)
    for theirs_one, unknown in zip(reaching(theirs), reaching(nowhere), strict=True):
        answer, missing = await other.call(*theirs_one), await other.call(*unknown)
        assert answer.status in {400, 404}, (theirs_one, answer.text)
        assert answer.text == missing.text
    assert await digest(server) == before


async def test_an_idempotency_key_means_nothing_elsewhere(
    server: ApiServer, elsewhere: tuple[ApiServer, dict[str, str]]
) -> None:
    """Two organizations use one key: two agents, and nothing of the other's answer (field report B41)."""
    other, _ = elsewhere
    headers, launched = {"Idempotency-Key": "everybody's first key"}, []
    for one in (server, other, server, other):
        body = {"config": await one.config(), "name": one.org}
        answer = await one.call("POST", f"{one.scope}/agents", body, headers=headers)
        launched.append((answer.status, answer.json["agent"]["id"], answer.json["agent"]["name"]))
    assert [status for status, _, _ in launched] == [201, 201, 200, 200]
    assert launched[0][1:] == launched[2][1:] != launched[1][1:] == launched[3][1:]
    assert [name for _, _, name in launched[:2]] == [server.org, other.org]


async def test_a_project_without_a_role_in_it_is_out_of_sight(server: ApiServer, theirs: dict[str, str]) -> None:
    """A member of the same organization, by every path that leads into the project."""
    member = await server.user(None)
    await server.get("/api/v1/me", key=member)  # notes that the key is used
    before = await digest(server)
    wrong = []
    for route in NAMING:
        if not route.path.startswith(("/api/v1/orgs/{orgID}/projects/{projectID}/", "/agents/")):
            continue
        answer = await server.call(route.method, filled(route, theirs), body_for(route, theirs), key=member)
        if (answer.status, answer.code) != (404, "not_found"):
            wrong.append((route.operation_id, answer.text))
    assert wrong == []
    assert await digest(server) == before


async def test_a_daemons_token_opens_no_door_of_people_and_theirs_none_of_a_daemon(
    server: ApiServer, theirs: dict[str, str]
) -> None:
    """By every operation there is: the one is refused as an unknown token is, and nothing is written."""
    org = f"/api/v1/orgs/{server.org}"
    token = (await made(server, f"{org}/machines/{theirs['machineID']}/daemon-tokens", {}))["token"]
    runtime = {"runtimeID": encode(IdKind.DAEMON_RUNTIME, new_uuid())}
    before = await digest(server)
    wrong = []
    for route in ROUTES:
        key = server.key if route.daemon else token
        answer = await server.call(route.method, filled(route, theirs | runtime), body_for(route, theirs), key=key)
        if (answer.status, answer.code) != (401, "unauthorized"):
            wrong.append((route.operation_id, answer.text))
    assert wrong == []
    assert await digest(server) == before


async def test_the_owner_finds_all_of_it(server: ApiServer, theirs: dict[str, str]) -> None:
    """Or else the tests above would ask for what is not there."""
    for route in NAMING:
        if route.method == "GET" and "/stream" not in route.path and route.operation_id != "getModelCatalog":
            headers = {"Authorization": f"Bearer {server.key}"}
            async with server.session.get(server.url + filled(route, theirs), headers=headers) as response:
                assert response.status == 200, route.operation_id


async def test_a_cursor_of_another_list_is_refused_by_every_list(server: ApiServer, theirs: dict[str, str]) -> None:
    """Also a damaged one (field report B37)."""
    await server.agent()
    await server.agent()
    agents = (await server.get(f"{server.scope}/agents?limit=1"))["next_cursor"]
    listing = [route for route in PEOPLES if route.query is not None and "cursor" in route.query.__struct_fields__]
    assert len(listing) >= 15
    for route in listing:
        foreign = agents if route.operation_id != "listAgents" else f"{agents[:-6]}AAAAAA"
        for cursor in (foreign, agents[:-4], "e30", "*"):
            answer = await server.call("GET", f"{filled(route, theirs)}?cursor={cursor}")
            assert (answer.status, answer.code) == (400, "invalid_request"), (route.operation_id, cursor)


@pytest.mark.parametrize("body", [b"[" * 20_000 + b"]" * 20_000, b'{"a":' * 20_000 + b"1" + b"}" * 20_000])
async def test_nested_brackets_are_refused_by_every_operation(
    server: ApiServer, theirs: dict[str, str], body: bytes
) -> None:
    for route in PEOPLES:
        answer = await server.call(route.method, filled(route, theirs), body)
        allowed = {(400, "validation_failed")} | ({(415, "unsupported_media_type")} if route.body is None else set())
        assert (answer.status, answer.code) in allowed, (route.operation_id, answer.text)
    assert (await server.call("GET", "/healthz")).status == 200
