"""A transaction pooler is recognised, and what works through one is what is sent through one.

Source: coordination §11.3, §11.4; field report B51.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from omnara.db.connection import ConnectSettings, ConnKind, connect
from omnara.db.pool import ApiPool
from omnara.db.pooler import is_transaction_pooler, resolve
from omnara.db.selftest import check_pooler
from omnara.errors import ConfigurationError
from tests.support.transaction_pooler import pooled

ADVISORY = (
    "select count(*) from pg_locks where locktype = 'advisory'"
    " and database = (select oid from pg_database where datname = current_database())"
)


@pytest.fixture(params=[2, 4])
async def pooled_dsn(empty_database: str, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    async with pooled(empty_database, size=request.param) as dsn:
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
