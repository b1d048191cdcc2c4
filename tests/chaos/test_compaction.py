"""`kill -9` of a worker while a conversation is summarised: the summary is made again, and saved once."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from omnara.client import Client
from omnara.testing import Answer, Conversation, ModelServer, Strictness, Timing, say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster, chaos_script
from tests.support.postgres import PostgresForTests
from tests.support.times import Times

SUMMARY = "## Goal\nWhat was asked."
WINDOW = 32_768
SLOW = Timing(delay_ms=1500)


def script(conversation: Conversation) -> Answer:
    """A summary takes its time at first, so that its worker can be killed meanwhile."""
    if conversation.system.startswith("You write the memory"):
        return Answer(blocks=say(SUMMARY).blocks, timing=SLOW if conversation.attempt == 1 else Timing())
    return chaos_script(conversation) if conversation.turn == 0 else say("go on")


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(postgres: PostgresForTests, tmp_path_factory: object, times: Times) -> AsyncIterator[Cluster]:
    """A cluster of its own, whose model has a small window."""
    directory = tmp_path_factory.mktemp("compaction")  # type: ignore[attr-defined]
    async with postgres.fresh() as dsn:
        made = Cluster(dsn, directory, times)
        made.model = ModelServer(script, strict=Strictness(models=None))
        async with made:
            (made.front,) = await made.start(roles="api")
            yield made


async def grown(cluster: Cluster, client: Client) -> Handle:
    """An agent whose next message is too much for its model."""
    agent = await cluster.agent(client, say("fine " * 4000), tools=())
    await agent.settled()
    for _ in range(2):
        await client.send(agent.id, "more " * 5000)
        await agent.settled()
    return agent


async def made_once(agent: Handle) -> None:
    await agent.settled()
    events = await agent.events()
    summaries = [event for event in events if event.kind == "context_checkpoint"]
    assert len(summaries) == 1
    # The model repeats what it is told: the summary, and after it what had no answer yet.
    answer = (await agent.texts())[-1]
    assert answer.startswith(f"<context_checkpoint>\n{SUMMARY}\n</context_checkpoint>")
    assert answer.count("last") == 5000
    states = [state for kind, state in await agent.step_states() if kind == "compaction"]
    assert states == ["interrupted", "succeeded"]
    assert (await agent.hot())["attempt"] == 0


async def test_during_the_call_and_during_the_save(cluster: Cluster) -> None:
    client = cluster.client(cluster.front)
    await cluster.agent(client, say("the model is known from now on"), tools=())
    await cluster.sql.execute("update configured_model_revisions set context_window_tokens = $1", WINDOW)
    first = await cluster.only_worker()
    calling, saving = [await grown(cluster, client) for _ in range(2)]
    for agent in (calling, saving):
        await client.send(agent.id, "last " * 5000)
        await first.probes.wait("compaction_begun", agent_id=agent.uuid)
        if agent is calling:
            first.kill_main()
            (first,) = await cluster.start()
            await made_once(calling)
    async with saving.locked():
        await first.probes.wait("saving", agent_id=saving.uuid, kind="compaction")
        (third,) = await cluster.start()
        first.kill_main()
    await made_once(saving)
    cluster.keep(third)
