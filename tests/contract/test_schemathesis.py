"""Requests that a machine makes up from the served document: whatever they are, the answers are as the document says.

Twice: with ids that nobody has, and with those of things that are there. Examples are the same in every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from omnara.api import openapi
from omnara.testing import Answer, Call, ModelServer, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, invariants_hold, model_server
from tests.support.pictures import block, png
from tests.support.postgres import PostgresForTests

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])
"""Of each operation and mode; the first make some 800 requests, half of them valid."""
TOOLS = """tools:
  ask_question: {}
  look:
    type: custom
    description: Looks.
    input_schema: {type: object}
"""
QUESTION = {"questions": [{"prompt": "Which?", "options": ["a", "b"]}]}
GENERIC = {"kind": "generic", "value": "a value"}
POOL = {
    "name": "pool",
    "provider": "docker",
    "max_total_machines": 2,
    "provider_config": {"image": "omnara/sandbox"},
}
ENDLESS = {path for path in openapi.document()["paths"] if path.endswith("/stream")}
"""An answer that is a stream does not end."""


@pytest.fixture(scope="module", params=EXAMPLES)
def requests_to_send(request: pytest.FixtureRequest) -> list[schemathesis.Case]:
    """Made before the server runs, whose threads would disturb what they are made from. What takes away comes last."""
    schema = schemathesis.openapi.from_dict(openapi.document())
    found = [result.ok() for result in schema.get_all_operations()]
    operations = sorted(found, key=_order)
    return [case for one in operations for mode in GenerationMode for case in _made_up(one, mode, request.param)]


def _order(operation: schemathesis.APIOperation) -> tuple[bool, int]:
    takes_away = operation.method == "delete" or operation.path.endswith(("/archive", "/revoke"))
    return takes_away, -operation.path.count("/")


def _made_up(operation: schemathesis.APIOperation, mode: GenerationMode, examples: int) -> list[schemathesis.Case]:
    made: list[schemathesis.Case] = []

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(mode))
    def make(case: schemathesis.Case) -> None:
        made.append(case)

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing about the operation can be wrong
        make()
    return made


@pytest_asyncio.fixture(loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def server(
    requests_to_send: list[schemathesis.Case], postgres: PostgresForTests, model: ModelServer
) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def made(server: ApiServer, path: str, body: Any, *, key: str | None = None) -> Any:
    """Make something over HTTP; return what the answer says."""
    answer = await server.call("POST", path, body, **({} if key is None else {"key": key}))
    assert answer.status in {200, 201}, answer.text
    return answer.json


async def things(server: ApiServer) -> dict[str, str]:
    """One of each kind of thing that a path can name, by the name of its parameter."""
    org = f"/api/v1/orgs/{server.org}"
    asked = Answer(blocks=(Call("ask_question", QUESTION), Call("look", {})))
    agent = await server.agent(embed(asked, say("fine")), source=CONFIG + TOOLS)
    await server.settled(agent, "waiting")
    waiting = (await server.say(agent, "later")).json["agent_input"]
    picture = await made(server, f"{agent}/inputs", {"content_blocks": [block(png())]})
    secret = await made(server, f"{org}/secrets", {"owner": {"kind": "org"}, "name": "one", "material": GENERIC})
    grant = await made(server, f"{org}/secrets/{secret['id']}/grants", {"target_project_id": server.project})
    provider = (await server.get(f"{org}/model-provider-configs"))["data"][0]
    model = (await server.get(f"{org}/model-provider-configs/{provider['id']}/models"))["data"][0]
    granted = (await server.get(f"{server.scope}/model-grants"))["data"][0]
    member = await server.get("/api/v1/me", key=await server.user())
    await server.org_key()
    keys = (await server.get(f"{org}/api-keys"))["data"]
    other = await server.user()
    connected = {"display_name": "box", "project_ids": [server.project]}
    machine = await made(server, f"{org}/machines/connect", connected)
    pool = await made(server, f"{org}/machine-pools", POOL)
    tokens = (await server.get("/api/v1/personal-access-tokens", key=other))["data"]
    return {
        "orgID": server.org,
        "projectID": server.project,
        "agentID": agent.rpartition("/")[2],
        "id": agent.rpartition("/")[2],
        "agentConfigID": await server.config(),
        "inputID": waiting["id"],
        "artifactID": picture["agent_input"]["content_blocks"][0]["artifact_id"],
        "toolCallID": (await server.get(f"{agent}/tool-calls?state=ready&type=custom"))["data"][0]["id"],
        "interactionID": (await server.get(f"{agent}/interactions"))["data"][0]["id"],
        "turnID": (await server.get(f"{agent}/turns"))["data"][0]["id"],
        "secretID": secret["id"],
        "grantID": grant["id"],
        "modelProviderConfigID": provider["id"],
        "configuredModelID": model["id"],
        "modelGrantID": granted["grant"]["id"],
        "userID": member["user"]["id"],
        "keyID": keys[0]["id"],
        "tokenID": tokens[0]["id"],
        "machineID": machine["machine"]["id"],
        "poolID": pool["id"],
        "poolGrantID": (await made(server, f"{server.scope}/machine-pool-grants", {"machine_pool_id": pool["id"]}))[
            "id"
        ],
        "machine-grants/{grantID}": machine["project_grants"][0]["id"],
        "daemon-tokens/{tokenID}": machine["token_record"]["id"],
    }


async def test_the_answers_are_as_the_document_says(
    server: ApiServer, requests_to_send: list[schemathesis.Case]
) -> None:
    """Never a 5xx, no status and no type that is not named, nothing left in the database that must not be there."""
    ids = await things(server)
    problems: list[str] = []
    statuses: Counter[tuple[str, int]] = Counter()
    with requests.Session() as session:
        for case in requests_to_send:
            await answered(server, session, case, statuses, problems)
        for case in requests_to_send:
            given = named(case.operation.path, ids)
            if given and case.operation.path not in ENDLESS:
                case.path_parameters = given
                await answered(server, session, case, statuses, problems)
    assert not problems, "\n".join(problems)
    assert len({label for label, status in statuses if status < 300}) > 40, "too few requests meet what is there"
    await invariants_hold(server)


def named(path: str, ids: dict[str, str]) -> dict[str, str]:
    """The things of a path; a parameter whose name means different kinds is found with what stands before it."""
    found = {}
    for before, name in re.findall(r"([^/]+)/\{(\w+)\}", path):
        value = ids.get(f"{before}/{{{name}}}", ids.get(name))
        if value is not None:
            found[name] = value
    return found


async def answered(
    server: ApiServer,
    session: requests.Session,
    case: schemathesis.Case,
    statuses: Counter[tuple[str, int]],
    problems: list[str],
) -> None:
    """Send one request; note what is wrong with its answer."""
    key = await server.user() if case.operation.label == "DELETE /api/v1/me" else server.key
    headers = {"Authorization": f"Bearer {key}"}
    response = await asyncio.to_thread(case.call, base_url=server.url, session=session, headers=headers, timeout=20)
    statuses[case.operation.label, response.status_code] += 1
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        problems += [f"{case.operation.label}: {failure}" for failure in failures.exceptions]
