"""Processes that are killed while they empty a deleted project, or a deleted organization."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from omnara.client import Client
from omnara.ids import IdKind, decode
from tests.support.cluster import Cluster
from tests.support.postgres import PostgresForTests
from tests.support.times import Times
from tests.support.waiting import until

AGENTS = 400
CONFIG = "instruction: Be brief.\nmodel: {provider_config: anthropic, name: claude-sonnet-4-6}\n"


async def test_a_deleted_project_is_emptied_whoever_is_killed(cluster: Cluster, client: Client) -> None:
    await deleted_and_emptied(cluster, client, "project")


@pytest.mark.slow
async def test_a_deleted_organization_is_emptied_whoever_is_killed(
    postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """In a cluster of its own: the organization is all that there is."""
    async with postgres.fresh() as dsn, Cluster(dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        (cluster.front,) = await cluster.start(roles="api")
        await deleted_and_emptied(cluster, cluster.client(cluster.front), "organization")
        await cluster.verify()


async def deleted_and_emptied(cluster: Cluster, client: Client, what: str) -> None:
    """Delete it with many agents, kill the process that empties it, and see the next one go on."""
    org = (await client.project_path()).split("/")[4]
    headers = {"Authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(cluster.front.url, headers=headers) as session:

        async def post(path: str, body: Any) -> Any:
            async with session.post(path, json=body) as response:
                assert response.status == 201, await response.text()
                return await response.json()

        project = (await post(f"/api/v1/orgs/{org}/projects", {"name": "Doomed"}))["id"]
        scope = f"/api/v1/orgs/{org}/projects/{project}"
        config = (await post(f"{scope}/agent-configs", {"source": CONFIG, "source_format": "yaml"}))["id"]
        agent = (await post(f"{scope}/agents", {"config": config}))["agent"]["id"]
        await cluster.sql.execute(MANY, decode(IdKind.AGENT, agent), AGENTS)
        async with session.delete(scope if what == "project" else f"/api/v1/orgs/{org}") as response:
            assert response.status == 204

    async def left() -> int:
        query = "select count(*) from agents where project_id = $1 and archived_at is null"
        return int(await cluster.sql.fetchval(query, decode(IdKind.PROJECT, project)))

    assert await left() == AGENTS + 1, "no request waits for the agents"
    (worker,) = await cluster.start()
    await until(lambda: archived_by(worker) >= 20, "it has begun", limit_s=20)
    worker.kill()
    assert 0 < await left() < AGENTS
    await cluster.start()

    async def empty() -> bool:
        return not await cluster.sql.fetchval("select exists (select from projects where emptying)")

    await until(empty, "all is empty", limit_s=30)
    assert await left() == 0
    secrets = await cluster.sql.fetchval("select count(*) from secret_versions")
    assert (secrets == 0) is (what == "organization")


def archived_by(worker: Any) -> int:
    return sum(point["point"] == "project_agent_archived" for point in worker.probes.points)


MANY = """
with made as (
  insert into agents (id, org_id, project_id, name, current_config_id)
  select gen_random_uuid(), org_id, project_id, 'one of many', current_config_id
  from agents, generate_series(1, $2) where id = $1 returning id, project_id, current_config_id),
turns as (insert into turns (agent_id, turn_sequence, id, first_sequence) select id, 1, id, 1 from made),
log as (
  insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, is_opening, is_semantic, payload)
  select m.id, 1, gen_random_uuid(), e.kind, m.id, 1, true, true, e.payload
  from made m, events e where e.agent_id = $1 and e.sequence = 1)
insert into agent_sched (agent_id, project_id, config_id, next_sequence, turn_id, turn_sequence)
select id, project_id, current_config_id, 2, id, 1 from made"""
"""Copies of an agent that was just launched."""
