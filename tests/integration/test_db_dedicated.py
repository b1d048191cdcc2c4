"""A dedicated connection: one user at a time, replaced when broken, never handed on in a doubtful state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from omnara.db.connection import Connection, ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.failures import DatabaseUnavailable
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until


@pytest.fixture
async def holder(empty_database: str) -> AsyncIterator[Dedicated]:
    dedicated = Dedicated(ConnectSettings(dsn=empty_database), ConnKind.SAVER)
    yield dedicated
    await dedicated.close()


async def pid_of(holder: Dedicated) -> int:
    async with holder.use() as conn:
        return conn.get_server_pid()


async def terminate(dsn: str, pid: int) -> None:
    conn = await asyncpg.connect(dsn)
    await conn.execute("select pg_terminate_backend($1, 5000)", pid)
    await conn.close()


async def test_the_same_connection_serves_one_task_at_a_time(holder: Dedicated) -> None:
    inside = 0

    async def work() -> int:
        nonlocal inside
        async with holder.use() as conn:
            inside += 1
            assert inside == 1
            await conn.fetchval("select pg_sleep(0.001)")
            inside -= 1
            return conn.get_server_pid()

    assert len(set(await asyncio.gather(*(work() for _ in range(20))))) == 1
    assert holder.generation == 1


async def test_a_terminated_connection_is_replaced(holder: Dedicated, empty_database: str) -> None:
    first = await pid_of(holder)
    await terminate(empty_database, first)
    await until(lambda: not holder.connected, "the loss is seen")
    assert await pid_of(holder) != first
    assert holder.generation == 2


async def test_loss_is_told_and_the_new_connection_is_prepared(empty_database: str) -> None:
    prepared: list[int] = []
    lost = asyncio.Event()

    async def on_connect(conn: Connection) -> None:
        prepared.append(conn.get_server_pid())

    settings = ConnectSettings(dsn=empty_database)
    holder = Dedicated(settings, ConnKind.SESSION, on_connect=on_connect, on_lost=lost.set)
    first = await pid_of(holder)
    await terminate(empty_database, first)
    async with asyncio.timeout(20):
        await lost.wait()
    lost.clear()
    assert prepared == [first, await pid_of(holder)]
    await holder.close()
    await asyncio.sleep(0)
    assert not lost.is_set()


async def test_a_hook_that_fails_never_yields_the_connection(empty_database: str) -> None:
    tries = 0

    async def on_connect(conn: Connection) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            await conn.execute("select pg_terminate_backend(pg_backend_pid())")

    holder = Dedicated(ConnectSettings(dsn=empty_database), ConnKind.SESSION, on_connect=on_connect)
    await pid_of(holder)
    assert (tries, holder.generation) == (3, 1)
    await holder.close()


async def test_waiting_for_an_absent_server_ends_in_time(unused_tcp_port: int) -> None:
    holder = Dedicated(ConnectSettings(dsn=f"postgresql://u:p@127.0.0.1:{unused_tcp_port}/d"), ConnKind.SAVER)
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(DatabaseUnavailable):
        async with holder.use(wait_s=0.4):
            pytest.fail("nobody listens there")
    assert loop.time() - started < 10


async def test_waiting_for_one_s_turn_ends_in_time(holder: Dedicated) -> None:
    async with holder.use():
        waiting = asyncio.create_task(holder.use(wait_s=0.05).__aenter__())
        with pytest.raises(DatabaseUnavailable, match="busy"):
            await waiting


async def test_cancellation_cuts_a_statement_that_may_still_run(holder: Dedicated, empty_database: str) -> None:
    first = await pid_of(holder)

    async def slow() -> None:
        async with holder.use() as conn:
            await conn.execute("select pg_sleep(30)")

    task = asyncio.create_task(slow())
    admin = await asyncpg.connect(empty_database)

    async def active() -> bool:
        return await admin.fetchval("select state = 'active' from pg_stat_activity where pid = $1", first)

    async def ended() -> bool:
        return not await admin.fetchval("select exists (select from pg_stat_activity where pid = $1)", first)

    await until(active, "the statement runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await pid_of(holder) != first
    assert await until(ended, "the server notices that nobody waits for the statement") < 15
    await admin.close()


async def test_an_open_transaction_is_never_handed_on(holder: Dedicated) -> None:
    async with holder.use() as conn:
        first = conn.get_server_pid()
        await conn.execute("begin")
    async with holder.use() as conn:
        assert conn.get_server_pid() != first
        assert not conn.is_in_transaction()


async def test_an_sql_error_keeps_the_connection(holder: Dedicated) -> None:
    first = await pid_of(holder)

    async def fail() -> None:
        async with holder.use() as conn:
            await conn.execute("select 1 / 0")

    with pytest.raises(asyncpg.DivisionByZeroError):
        await fail()
    assert await pid_of(holder) == first


async def test_prepared_statements_stay_with_the_connection(holder: Dedicated) -> None:
    sql = "select $1::int + 1"
    for number in range(3):
        async with holder.use() as conn:
            assert await conn.fetchval(sql, number) == number + 1
    async with holder.use() as conn:
        assert await conn.fetchval("select count(*) from pg_prepared_statements where statement = $1", sql) == 1


async def test_recovery_from_a_cut_is_within_seconds(empty_database: str) -> None:
    async with proxied(empty_database) as (proxy, dsn):
        holder = Dedicated(ConnectSettings(dsn=dsn), ConnKind.SAVER)
        await pid_of(holder)
        proxy.cut()
        loop = asyncio.get_running_loop()
        started = loop.time()
        await until(lambda: not holder.connected, "the cut is seen")
        await pid_of(holder)
        assert loop.time() - started < 15
        await holder.close()


async def test_a_closed_holder_refuses(holder: Dedicated) -> None:
    await pid_of(holder)
    await holder.close()
    with pytest.raises(RuntimeError, match="closed"):
        await pid_of(holder)
