"""A transaction pooler is recognised, and what works through one is what is sent through one.

Source: coordination §11.3, §11.4; field report B51.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from omnara.client import ApiError, Delta, Event
from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.db.pool import ApiPool
from omnara.db.pooler import is_transaction_pooler, resolve
from omnara.db.selftest import check_pooler
from omnara.errors import ConfigurationError
from omnara.testing import say
from tests.support.cluster import Cluster
from tests.support.pgbouncer import PgBouncer, pgbouncer
from tests.support.postgres import PostgresForTests
from tests.support.processes import ServerProcess
from tests.support.times import SHRUNK
from tests.support.transaction_pooler import pooled
from tests.support.waiting import until

ADVISORY = (
    "select count(*) from pg_locks where locktype = 'advisory'"
    " and database = (select oid from pg_database where datname = current_database())"
)


@pytest.fixture(params=["imitation of 2", "imitation of 4", "pgbouncer"])
async def pooled_dsn(empty_database: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Through the pooler that is in the tests, which is there always, and through PgBouncer where that is installed."""
    if request.param == "pgbouncer":
        async with pgbouncer(empty_database) as bouncer:
            yield bouncer.dsn
        return
    async with pooled(empty_database, size=int(request.param[-1])) as dsn:
        yield dsn


async def test_two_connections_tell_a_pooler_from_a_server(empty_database: str, pooled_dsn: str) -> None:
    assert await is_transaction_pooler(pooled_dsn)
    assert not await is_transaction_pooler(empty_database)


async def test_one_connection_would_be_fooled(pooled_dsn: str) -> None:
    conn = await asyncpg.connect(pooled_dsn, statement_cache_size=0)
    try:
        assert await conn.fetchval("select pg_try_advisory_lock(7)")
        assert await conn.fetchval(
            "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        )
    finally:
        await conn.close()
    other = await asyncpg.connect(pooled_dsn, statement_cache_size=0)
    try:
        assert await other.fetchval(ADVISORY) == 1
    finally:
        await other.close()


async def test_start_up_settings_are_refused_by_a_pooler(pooled_dsn: str) -> None:
    with pytest.raises(asyncpg.ProtocolViolationError, match="unsupported startup parameter"):
        await connect(ConnectSettings(dsn=pooled_dsn), ConnKind.API)


async def test_a_pooler_alone_is_refused_with_what_to_do(pooled_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="OMNARA_DATABASE_DIRECT_URL"):
        await resolve(ConnectSettings(dsn=pooled_dsn))
    with pytest.raises(ConfigurationError, match="must reach Postgres itself"):
        await resolve(ConnectSettings(dsn=pooled_dsn, direct_dsn=pooled_dsn))
    assert not (await check_pooler(ConnectSettings(dsn=pooled_dsn))).ok


async def test_a_direct_database_needs_no_second_url(empty_database: str) -> None:
    assert not (await resolve(ConnectSettings(dsn=empty_database))).pooled


async def test_requests_go_through_the_pooler_under_our_rules(empty_database: str, pooled_dsn: str) -> None:
    admin = await asyncpg.connect(empty_database)
    await admin.execute("create table saved (v text)")
    await admin.close()
    settings = await resolve(ConnectSettings(dsn=pooled_dsn, direct_dsn=empty_database))
    assert settings.pooled
    session = await connect(settings, ConnKind.SESSION)
    assert await session.fetchval("show application_name") == "omnara:session"
    await session.close()
    pool = ApiPool(settings)
    await pool.start()
    try:
        names = ("transaction_isolation", "synchronous_commit", "lock_timeout", "idle_in_transaction_session_timeout")
        for _ in range(3):
            async with pool.transaction() as conn:
                actual = [await conn.fetchval(f"show {name}") for name in names]
                await conn.execute("insert into saved values ($1)", "x")
            assert actual == ["read committed", "on", "2s", "10s"]
        async with pool.acquire() as conn:
            assert await conn.fetchval("select count(*) from saved") == 3
            assert await conn.fetchval("show lock_timeout") == "0"
    finally:
        await pool.close()


async def test_a_plan_is_never_looked_for_on_another_server_connection(empty_database: str) -> None:
    async with pooled(empty_database, size=2) as dsn:
        settings = await resolve(ConnectSettings(dsn=dsn, direct_dsn=empty_database))
        pool = ApiPool(settings, size=1)
        await pool.start()
        other = await asyncpg.connect(dsn, statement_cache_size=0)
        try:
            async with pool.acquire() as conn:
                first = await conn.fetchval("select pg_backend_pid()")
                async with other.transaction():
                    assert await other.fetchval("select pg_backend_pid()") == first
                    assert await conn.fetchval("select pg_backend_pid()") != first
        finally:
            other.terminate()
            await pool.close()


@pytest.mark.parametrize("settings", [{"default_pool_size": 1}, {"server_round_robin": 1}], ids=str)
async def test_pgbouncer_is_recognised_however_it_hands_out_connections(
    empty_database: str, settings: dict[str, int]
) -> None:
    """A single server connection made the look at the idle client wait; two in turns came round to the first one."""
    async with pgbouncer(empty_database, **settings) as bouncer:
        for _ in range(3):
            assert await is_transaction_pooler(bouncer.dsn, timeout_s=20.0)


async def test_pgbouncer_is_recognised_while_others_use_it(empty_database: str) -> None:
    async with pgbouncer(empty_database, default_pool_size=3) as bouncer, asyncio.TaskGroup() as group:
        others = [group.create_task(_keep_busy(bouncer.dsn)) for _ in range(4)]
        for _ in range(10):
            assert await is_transaction_pooler(bouncer.dsn)
        for other in others:
            other.cancel()


async def _keep_busy(dsn: str) -> None:
    conn = await asyncpg.connect(dsn, statement_cache_size=0)
    try:
        while True:
            await conn.fetchval("select pg_backend_pid()")
    finally:
        conn.terminate()


async def test_a_session_pooler_needs_a_direct_url_too(empty_database: str) -> None:
    """It shares no connection, but refuses our settings; requests go through it as through any other."""
    async with pgbouncer(empty_database, pool_mode="session", default_pool_size=8) as bouncer:
        with pytest.raises(ConfigurationError, match="set OMNARA_DATABASE_DIRECT_URL"):
            await resolve(ConnectSettings(dsn=bouncer.dsn))
        settings = await resolve(ConnectSettings(dsn=bouncer.dsn, direct_dsn=empty_database))
        assert settings.pooled
        (await connect(settings, ConnKind.API)).terminate()


async def test_statement_mode_is_refused_at_once_wherever_it_is(empty_database: str) -> None:
    """No transaction goes through it. Its refusal looks like a lost connection, which a start would wait out."""
    async with pgbouncer(empty_database, pool_mode="statement") as bouncer:
        settings = [
            ("OMNARA_DATABASE_URL leads", ConnectSettings(dsn=bouncer.dsn)),
            ("OMNARA_DATABASE_URL leads", ConnectSettings(dsn=bouncer.dsn, direct_dsn=empty_database)),
            ("OMNARA_DATABASE_DIRECT_URL leads", ConnectSettings(dsn=empty_database, direct_dsn=bouncer.dsn)),
        ]
        for text, one in settings:
            async with asyncio.timeout(20):
                with pytest.raises(ConfigurationError, match=f"{text} through a pooler in statement mode"):
                    await resolve(one)
        found = await check_pooler(ConnectSettings(dsn=bouncer.dsn))
        assert not found.ok
        assert "statement mode" in found.detail


async def test_a_server_behind_statement_mode_does_not_start(database: str, tmp_path: Path) -> None:
    async with (
        pgbouncer(database, pool_mode="statement") as bouncer,
        Cluster(database, tmp_path, SHRUNK, OMNARA_DATABASE_URL=bouncer.dsn) as cluster,
    ):
        server = cluster.make(roles="api,worker,maintenance")
        server.launch()
        assert await server.exited(limit_s=30) == 2
        assert "statement mode" in server.log_tail()


async def test_both_urls_must_lead_to_one_database(empty_database: str, postgres: PostgresForTests) -> None:
    async with postgres.empty() as another, pgbouncer(another) as bouncer:
        with pytest.raises(ConfigurationError, match="different databases"):
            await resolve(ConnectSettings(dsn=bouncer.dsn, direct_dsn=empty_database))


async def test_many_statements_share_two_server_connections(database: str) -> None:
    """No statement is ever looked for where it was not prepared, whatever types it has and however many clients run."""
    async with pgbouncer(database, default_pool_size=2) as bouncer:
        pool = ApiPool(await resolve(ConnectSettings(dsn=bouncer.dsn, direct_dsn=database)), size=8)
        await pool.start()

        async def work(number: int) -> None:
            for _ in range(10):
                async with pool.acquire() as conn:
                    assert await conn.fetchval("select $1::int + 1", number) == number + 1
                    assert await conn.fetchval("select $1::jsonb", '{"a": 1}') == '{"a": 1}'
                    assert await conn.fetch("select void from agent_sched where agent_id = any($1::uuid[])", []) == []
                    assert await conn.fetchval("select '{[1,3)}'::int8multirange") is not None
                async with pool.transaction() as conn:
                    assert await conn.fetchval("select count(*) from agents where name = $1", str(number)) == 0

        try:
            await asyncio.gather(*(work(number) for number in range(16)))
        finally:
            await pool.close()


async def test_a_server_behind_pgbouncer_alone_does_not_start(database: str, tmp_path: Path) -> None:
    async with (
        pgbouncer(database) as bouncer,
        Cluster(database, tmp_path, SHRUNK, OMNARA_DATABASE_URL=bouncer.dsn) as cluster,
    ):
        server = cluster.make(roles="api,worker,maintenance")
        server.launch()
        assert await server.exited(limit_s=30) != 0
        assert "set OMNARA_DATABASE_DIRECT_URL" in server.log_tail()


async def test_servers_behind_pgbouncer_launch_step_stream_and_survive_kill_9(database: str, tmp_path: Path) -> None:
    async with (
        pgbouncer(database, default_pool_size=2) as bouncer,
        Cluster(
            database,
            tmp_path,
            SHRUNK,
            OMNARA_DATABASE_URL=bouncer.dsn,
            OMNARA_DATABASE_DIRECT_URL=database,
        ) as cluster,
    ):
        front, _ = await cluster.start(2, roles="api,worker,maintenance")
        agent = await cluster.agent(cluster.client(front), say("answer {{attempt}}"), gate="mid_text")
        await agent.gate.reached(30)
        victim = await cluster.runner_of(agent)
        survivor = next(replica for replica in cluster.replicas if replica is not victim)
        agent.client = client = cluster.client(survivor)
        async with client.stream(agent.id, deltas=True) as events, asyncio.timeout(30):
            async for first in events:
                assert isinstance(first, Event)
                break
            victim.kill_main()
            shown: list[Delta] = []
            async for item in events:
                if isinstance(item, Delta):
                    shown.append(item)
                elif isinstance(item, Event) and item.kind == "model_output":
                    break
        assert shown, "the second attempt was streamed"
        await agent.settled()
        assert await agent.texts() == ["answer 2"]
        assert await agent.step_states() == [("model", "interrupted"), ("model", "succeeded")]
        await _outage(cluster, survivor, bouncer)
        await cluster.verify()
        await cluster.end(survivor)


async def _outage(cluster: Cluster, server: ServerProcess, bouncer: PgBouncer) -> None:
    """While the pooler is away the API says so and work goes on; when it is back, so is the API, without help."""
    client, impatient = cluster.client(server), cluster.client(server, retry_for_s=0.0)
    late = await cluster.agent(client, say("late"), gate="mid_text")
    await late.gate.reached(30)
    await bouncer.kill()
    late.gate.release()
    await late.settled()
    with pytest.raises(ApiError) as refused:
        await impatient.status(late.id)
    assert refused.value.status == 503
    await bouncer.start()

    async def answers() -> bool:
        try:
            return bool(await impatient.status(late.id))
        except ApiError:
            return False

    await until(answers, "the API is back", limit_s=30)
    many = await asyncio.gather(*(cluster.agent(client, say("fine")) for _ in range(20)))
    for one in many:
        await one.settled()
    assert await late.texts() == ["late"]
