"""What clients see of an agent's machines: bindings at launch, ids with the agent, warnings with the config.

Source: contract (LaunchAgentResponse, GetAgentResponse, AgentConfig.warnings); api.md §9.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest_asyncio

from omnara.testing import ModelServer, call, embed, embedded
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.postgres import PostgresForTests


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def config(server: ApiServer, **changes: Any) -> Any:
    """Create a config with further parts; the answer."""
    source = msgspec.yaml.decode(CONFIG) | changes
    body = {"source": msgspec.json.encode(source).decode(), "source_format": "json"}
    return await server.call("POST", f"{server.scope}/agent-configs", body)


async def test_bindings_ids_and_warnings(server: ApiServer) -> None:
    org = f"/api/v1/orgs/{server.org}"
    body = {"display_name": "laptop", "project_ids": [server.project]}
    machine = (await server.call("POST", f"{org}/machines/connect", body)).json["machine"]
    secret = (
        await server.call(
            "POST",
            f"{org}/secrets",
            {
                "owner": {"kind": "project", "project_id": server.project},
                "name": "token",
                "material": {"kind": "generic", "value": "a value"},
            },
        )
    ).json
    sources = [
        {
            "machine": "laptop",
            "ref": "mine",
            "description": "the laptop",
            "cwd": "/src",
            "env_overlay": {"A": "1", "B": None},
            "secret_env_overlay": {"TOKEN": secret["id"]},
        }
    ]
    made = (await config(server, machine_sources=sources)).json
    assert "warnings" not in made
    body = {"config": made["id"], "name": "with a machine"}
    launched = (await server.call("POST", f"{server.scope}/agents", body)).json
    [binding] = launched["machine_bindings"]
    assert (binding["machine_id"], binding["machine_ref"]) == (machine["id"], "mine")
    assert binding["binding_kind"] == "explicit"
    assert (binding["state"], binding["cwd"], binding["description"]) == ("attached", "/src", "the laptop")
    assert binding["env_overlay"] == {"A": "1", "B": None}
    assert binding["secret_env_overlay"] == {"TOKEN": secret["id"]}
    agent = f"{server.scope}/agents/{launched['agent']['id']}"
    assert (await server.get(agent))["machine_ids"] == [machine["id"]]
    await server.call("POST", f"{agent}/archive")
    assert (await server.get(agent))["machine_ids"] == []


async def test_missing_tools_are_a_warning_and_unknown_machines_an_error(server: ApiServer) -> None:
    tools = {"run_command": {"enabled": False}, "upload_file": {"enabled": False}}
    body = {"display_name": "tower", "project_ids": [server.project]}
    await server.call("POST", f"/api/v1/orgs/{server.org}/machines/connect", body)
    made = (await config(server, machine_sources=[{"machine": "tower"}], tools=tools)).json
    [warning] = made["warnings"]
    assert warning["code"] == "missing_recommended_machine_tools"
    assert "run_command" in warning["message"]
    assert "upload_file" not in warning["message"]
    refused = await config(server, machine_sources=[{"machine": "nobody"}])
    assert (refused.status, refused.code) == (400, "invalid_request")
    assert "machine_sources.0.machine" in refused.json["error"]


async def test_a_pool_without_room_is_a_conflict(server: ApiServer) -> None:
    org = f"/api/v1/orgs/{server.org}"
    body = {"name": "small", "provider": "docker", "max_total_machines": 1, "provider_config": {}}
    made = await server.call("POST", f"{org}/machine-pools", body)
    assert made.status == 201, made.text
    await server.rows(
        "insert into machine_pool_grants (id, org_id, project_id, pool_id)"
        " select gen_random_uuid(), p.org_id, j.id, p.id from machine_pools p, projects j where p.name = 'small'"
    )
    sources = [{"pool": "small", "initial_num_machines": 2, "max_machines": 2}]
    compiled = (await config(server, machine_sources=sources)).json
    refused = await server.call("POST", f"{server.scope}/agents", {"config": compiled["id"]})
    assert (refused.status, refused.code) == (409, "conflict")
    assert "no room" in refused.json["error"]


async def test_a_flat_agent_with_run_command_asks_for_a_sandbox(server: ApiServer) -> None:
    message = embed(call("run_command", {"command": "true"}))
    body = {"system_prompt": "Run.", "model": "claude-sonnet-4-6", "message": message, "tools": ["run_command"]}
    made = await server.call("POST", "/agents", body)
    assert made.status == 201, made.text
    agent = made.json["links"]["events"].removesuffix("/events")
    await server.settled(agent, "waiting")
    scoped = await server.get(agent)
    assert len(scoped["machine_ids"]) == 1
    rows = await server.rows("select provider, state from machines m join processes p on p.machine_id = m.id")
    assert [tuple(row) for row in rows] == [("docker", "queued")]

    pools = f"/api/v1/orgs/{server.org}/machine-pools"
    [pool] = [pool for pool in (await server.get(pools))["data"] if pool["name"] == "sandboxes-docker"]
    tuned = await server.call("PUT", f"{pools}/{pool['id']}", {"delete_after_idle_minutes": 120})
    assert tuned.status == 200, tuned.text
    again = await server.call("POST", "/agents", body)
    await server.settled(again.json["links"]["events"].removesuffix("/events"), "waiting")
    rows = await server.rows("select delete_after_idle_minutes from machines where provider = 'docker' order by id")
    assert [row[0] for row in rows[-2:]] == [None, 120], "a sandbox stays unless its pool says otherwise"
