"""The primary dies, its streaming standby is promoted: with commits that waited for it, and with a lost tail."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnara.client import ApiError, Event, StreamBroken
from omnara.db.embedded import EmbeddedPostgres
from omnara.domain.content import INTERRUPTED_TEXT
from omnara.testing import Answer, Call, call, say
from tests.chaos.test_postgres import RECOVERY_S, end_postgres
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.load import Load
from tests.support.standby import caught_up, primary_in, promote, standby_of, wait_for_standby, with_both
from tests.support.tcp_proxy import TcpProxy, proxied
from tests.support.times import Times
from tests.support.waiting import until


class Pair:
    """A primary, and a standby that follows it through a network that can go silent."""

    def __init__(self, primary: EmbeddedPostgres, standby: EmbeddedPostgres, network: TcpProxy) -> None:
        self.primary = primary
        self.standby = standby
        self.network = network
        self.dsn = with_both(primary.dsn, standby.dsn)

    async def fail_over(self) -> None:
        """Kill the primary, and promote the standby once nothing of the primary runs any more."""
        end_postgres(self.primary, signal.SIGKILL)
        await self.primary.stop()
        await promote(self.standby.dsn)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(own_directory: Path, pg_bin: Path | None) -> AsyncIterator[Pair]:
    """Two servers of the test's own."""
    own_directory.mkdir()
    async with primary_in(own_directory / "one", pg_bin) as primary, proxied(primary.dsn) as (network, through):
        standby = await standby_of(through, own_directory / "two", pg_bin)
        try:
            yield Pair(primary, standby, network)
        finally:
            await standby.stop()


async def test_nothing_is_lost_when_commits_wait_for_the_standby(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """As after a restart: the processes go on under their identities; what was acknowledged is there, once."""
    await wait_for_standby(pair.primary.dsn)
    async with Cluster(pair.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        replicas = await cluster.start(2, "api,worker,maintenance")
        clients = [cluster.client(replica) for replica in replicas]
        identities = [replica.worker_id for replica in replicas]
        long = await cluster.agent(clients[0], say("one long answer"), gate="mid_text")
        await long.gate.reached(30)
        load = Load(cluster, "failover")
        await load.begin(clients, 10)
        load.follow(3)
        await load.goes_on(within_s=RECOVERY_S)
        await pair.fail_over()
        await load.goes_on(within_s=RECOVERY_S)
        long.gate.release()
        launched = await cluster.agent(clients[1], say("launched on the new primary"))
        await load.end()
        for agent in (long, launched):
            await agent.settled()
            assert len(agent.requests) == 1
        await load.check(undisturbed=True)
        assert [replica.worker_id for replica in replicas] == identities, "nobody took a failover for a death"
        assert {await cluster.worker_state(worker) for worker in identities} == {"live"}
        await cluster.verify()
        await cluster.end(*replicas)


async def test_a_lost_tail_leaves_every_agent_whole(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """What the standby never got is gone, though one process still holds it in memory, and still holds the claims.

    Each agent goes on from what the new primary has: no result without its call, nothing of the lost events in what a
    model is told, no call that waits for ever, and a reader is told that its copy is no good.
    """
    async with Cluster(pair.dsn, tmp_path_factory.mktemp("cluster"), times) as cluster:
        (replica,) = await cluster.start(1, "api,worker,maintenance")
        client = cluster.client(replica)
        for name in ("quick", "slow", "lost"):
            cluster.page.hold(name)
        talker = await cluster.agent(client, say("one"), say("two"), say("three"))
        await talker.settled()
        asking = await cluster.agent(client, say("asked once"), gate="mid_text")
        fetch = call("web_fetch", cluster.fetch("lost"))
        calling = await cluster.agent(client, fetch, say("{{result -1}}"), gate="mid_text")
        both = Answer(blocks=tuple(Call("web_fetch", cluster.fetch(name)) for name in ("quick", "slow")))
        halfway = await cluster.agent(client, both, say("fine"))
        for agent in (asking, calling):
            await agent.gate.reached(30)
        for name in ("quick", "slow"):
            await cluster.page.visited(name)
        await caught_up(pair.primary.dsn, pair.standby.dsn)
        pair.network.go_silent()
        await client.send(talker.id, "a message that is lost")
        await until(lambda: len(talker.requests) == 2, "it is answered")
        await talker.settled()
        calling.gate.release()
        await cluster.page.visited("lost")
        head = (await halfway.hot())["next_sequence"]
        cluster.page.release("quick")
        await until(lambda: grown(halfway, head), "one of two results is saved")
        gone = await cluster.agent(client, say("never"), gate="mid_text")
        await gone.gate.reached(30)
        reader = await reading(talker)
        await pair.fail_over()
        for name in ("slow", "lost"):
            cluster.page.release(name)
        for agent in (asking, gone):
            agent.gate.release()
        await told_that_it_was_cut(reader)
        await client.send(talker.id, "a message that is kept")
        for agent in (talker, asking, calling, halfway):
            await agent.settled()
        with pytest.raises(ApiError) as refused:
            await client.status(gone.id)
        assert refused.value.status == 404
        told = str(talker.requests[-1].body)
        assert "a message that is kept" in told
        assert "a message that is lost" not in told
        assert (await asking.texts(), len(asking.requests)) == (["asked once"], 1)
        assert (await calling.texts())[-1].startswith("page lost")
        assert cluster.page.hits["lost"] == 2, "of the first visit the database knows nothing"
        results = [(event.outcome, event.text) for event in await halfway.events() if event.kind == "tool_result"]
        assert results == [("failed", INTERRUPTED_TEXT)] * 2
        assert (cluster.page.hits["quick"], cluster.page.hits["slow"]) == (1, 1)
        for agent in (asking, calling, halfway):
            await client.send(agent.id, "and now?")
            await agent.settled()
        cluster.agents.remove(gone)
        await cluster.verify()
        await cluster.end(replica)


async def grown(agent: Handle, head: int) -> bool:
    """Whether the agent's log has become longer."""
    return bool((await agent.hot())["next_sequence"] > head)


async def reading(agent: Handle) -> asyncio.Task[None]:
    """Read the agent's stream to its present end; the task ends when the stream does, with what ended it."""
    last = (await agent.hot())["next_sequence"] - 1
    arrived = asyncio.Event()

    async def read() -> None:
        async with agent.client.stream(agent.id) as events:
            async for event in events:
                if isinstance(event, Event) and event.sequence == last:
                    arrived.set()

    task = asyncio.create_task(read())
    async with asyncio.timeout(20):
        await arrived.wait()
    return task


async def told_that_it_was_cut(reader: asyncio.Task[None]) -> None:
    """The stream ends and says why: silence would leave the reader with what never was."""
    with pytest.raises(StreamBroken, match="lost the end of this log"):
        async with asyncio.timeout(RECOVERY_S):
            await reader
