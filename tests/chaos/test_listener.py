"""The network swallows what one process's LISTEN connection carries, and nothing tells either end. Field report B48."""

from __future__ import annotations

import pytest

from omnara.client import Event
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.postgres import PostgresForTests
from tests.support.tcp_proxy import proxied
from tests.support.times import Times
from tests.support.waiting import until

LISTENER = "omnara:listen"
NOTICED_S = 30.0
"""A heartbeat, and the time that it is waited for, are 5 s each."""


async def test_a_deaf_process_works_on_and_hears_again(
    postgres: PostgresForTests, tmp_path_factory: pytest.TempPathFactory, times: Times
) -> None:
    """Messages, cancels and events that others announce cost a sweep each; it is no death; then it listens again."""
    async with (
        postgres.fresh() as dsn,
        proxied(dsn) as (network, through),
        Cluster(dsn, tmp_path_factory.mktemp("cluster"), times) as cluster,
    ):
        (speaker,) = await cluster.start(1, "api")
        (deaf,) = await cluster.start(1, "api,worker,maintenance", {"DATABASE_URL": through})
        client = cluster.client(speaker)
        identity = deaf.worker_id
        long = await cluster.agent(client, say("an answer that is stopped"), say("and then"), gate="mid_text")
        await long.gate.reached(30)
        before = await listeners(cluster)
        network.go_silent(LISTENER)
        started = await cluster.agent(client, say("one"), say("two"))
        await started.asked(1, within_s=times.patience_s)
        await started.settled()
        async with cluster.client(deaf).stream(long.id) as events:
            await client.cancel(long.id)
            async for event in events:
                if isinstance(event, Event) and event.control_type == "cancel_current":
                    break
        await long.settled()
        await until(lambda: bool(deaf.log_lines("the hint connection was lost")), "it is noticed", limit_s=NOTICED_S)
        await client.send(started.id, "while it cannot connect")
        await started.asked(2, within_s=times.patience_s)
        assert await deaf.readyz() == 200
        network.flow()
        await until(lambda: heard_again(cluster, before), "it listens again", limit_s=NOTICED_S)
        await client.send(long.id, "go on")
        for agent in (started, long):
            await agent.settled()
            assert len(agent.requests) == 2
        assert deaf.worker_id == identity, "half of the identity's connections were enough"
        assert await cluster.worker_state(identity) == "live"
        await cluster.verify()
        await cluster.end(speaker, deaf)


async def listeners(cluster: Cluster) -> set[int]:
    """The server's processes that listen for hints."""
    query = """select pid from pg_stat_activity where application_name = $1 and datname = current_database()
               and state = 'idle' and query ilike '%listen%'"""
    return {row["pid"] for row in await cluster.sql.fetch(query, LISTENER)}


async def heard_again(cluster: Cluster, before: set[int]) -> bool:
    """Whether as many listen as before, one of them newly."""
    now = await listeners(cluster)
    return len(now) == len(before) and len(now - before) == 1
