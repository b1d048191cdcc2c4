"""One replica's clock is two minutes ahead: only durations, and the database's clock, decide. Field report B08."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

from omnara.client import Client
from omnara.testing import rate_limited, say
from tests.chaos.test_models import Case, dated, in_seconds, struck, tried_again
from tests.support.cluster import MODEL, Cluster
from tests.support.faketime import wrong_clock
from tests.support.load import Load
from tests.support.processes import ServerProcess
from tests.support.waiting import until

AHEAD_S = 120.0


async def test_one_replica_is_two_minutes_ahead(cluster: Cluster, client: Client) -> None:
    """Its retries wait as long as asked, nobody's lease is taken for run out, and what it writes has the right time."""
    (ahead,) = await cluster.start(1, "api,worker,maintenance", around=wrong_clock(AHEAD_S))
    assert abs(await clock_of(ahead) - AHEAD_S) < 10
    cases = [Case("seconds", rate_limited("2"), 2.0), dated(in_seconds(8))]
    retried = [await struck(cluster, client, case) for case in cases]
    for agent in retried:
        await agent.asked(1)
    (right,) = await cluster.start(1, "api,worker,maintenance")
    clients = [cluster.client(ahead), cluster.client(right)]
    long = await cluster.agent(clients[0], say("one long answer"), gate="mid_text")
    await long.gate.reached(30)
    load = Load(cluster, "clocks")
    await load.begin(clients, 8)
    for agent in cluster.agents:
        agent.client = clients[0]  # the one that stays
    load.follow(2)
    await load.goes_on()
    key = "the same launch, at both"
    launches = [await one.launch(model=MODEL, system_prompt="x", key=key) for one in clients]
    assert launches[0].id == launches[1].id
    for agent, case in zip(retried, cases, strict=True):
        await tried_again(agent, case)
    leased = await leases(cluster)
    await until(lambda: leases_renewed(cluster, leased, 2), "both renew", limit_s=cluster.times.lease_s + 20)
    for replica in (ahead, right):
        assert await cluster.worker_state(replica.worker_id) == "live"
        assert not declared(ahead, replica)
        assert not declared(right, replica)
    await load.goes_on()
    right.kill_main()
    await until(lambda: declared(ahead, right), "its death is seen", limit_s=20)
    await load.goes_on()
    long.gate.release()
    await load.end()
    await long.settled()
    assert (await long.texts())[-1] == "one long answer"
    await load.check()
    assert await too_late(cluster) == []
    everyone = [agent.id for agent in await clients[0].agents()]
    assert len(everyone) == len(set(everyone))
    assert {agent.id for agent in cluster.agents} <= set(everyone)
    await cluster.end(ahead)


def declared(judge: ServerProcess, other: ServerProcess) -> bool:
    """Whether the first has declared the second dead."""
    return any(str(other.worker_id) in line["workers"] for line in judge.log_lines("workers_declared_dead"))


async def clock_of(replica: ServerProcess) -> float:
    """By how many seconds the clock of a process is ahead, by its own word."""
    async with aiohttp.ClientSession() as session, session.get(f"{replica.url}/agents") as response:
        return (parsedate_to_datetime(response.headers["Date"]) - datetime.now(UTC)).total_seconds()


async def leases(cluster: Cluster) -> dict[str, datetime]:
    """When the leases of the live workers run out."""
    rows = await cluster.sql.fetch("select id::text, lease_expires_at from workers where state = 'live'")
    return {row["id"]: row["lease_expires_at"] for row in rows}


async def leases_renewed(cluster: Cluster, before: dict[str, datetime], count: int) -> bool:
    """Whether so many of these have been renewed since."""
    now = await leases(cluster)
    return sum(now.get(worker, until) > until for worker, until in before.items()) >= count


async def too_late(cluster: Cluster) -> list[str]:
    """The columns that hold a moment which only a clock that is ahead can have written."""
    columns = await cluster.sql.fetch(
        """select table_name, column_name from information_schema.columns join pg_class on relname = table_name
           where table_schema = 'public' and data_type like 'timestamp%' and relkind = 'r'"""
    )
    assert len(columns) > 20
    found = []
    for table, column in columns:
        query = f"select exists (select from {table} where {column} > clock_timestamp() + interval '60 seconds')"
        if await cluster.sql.fetchval(query):
            found.append(f"{table}.{column}")
    return found
