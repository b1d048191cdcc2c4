"""The API's pool: waiting is bounded, nothing leaks, and what went wrong is told in a way that helps.

Source: field report B52, coordination §9 and §11.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from omnara.db.connection import LIMITS, Connection, ConnectSettings, ConnKind, Limits
from omnara.db.failures import DatabaseUnavailable
from omnara.db.pool import RETRIES, ApiPool
from omnara.errors import Unavailable
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def open_pool(
    settings: ConnectSettings, size: int = 3, acquire_timeout_s: float = 30.0
) -> AsyncIterator[ApiPool]:
    pool = ApiPool(settings, size=size, acquire_timeout_s=acquire_timeout_s)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
async def pool(empty_database: str) -> AsyncIterator[ApiPool]:
    async with open_pool(ConnectSettings(dsn=empty_database)) as opened:
        yield opened


async def sessions(dsn: str, state: str) -> int:
    conn = await asyncpg.connect(dsn)
    try:
        return await conn.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and state like $1"
            " and pid <> pg_backend_pid()",
            state,
        )
    finally:
        await conn.close()


async def test_two_thousand_cancelled_requests_leak_nothing(pool: ApiPool, empty_database: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def request() -> None:
        async with pool.transaction() as conn:
            await conn.fetchval("select pg_sleep(0.002)")
            await conn.fetchval("select 1")

    async def dropped(after_s: float) -> None:
        task = asyncio.create_task(request())
        await asyncio.sleep(after_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Unavailable):
            await task

    for _ in range(20):
        await asyncio.gather(*(dropped(rng.uniform(0.0, 0.05)) for _ in range(100)))
    async with asyncio.timeout(20):
        await asyncio.gather(*(request() for _ in range(10)))
    assert pool.in_use == 0, f"seed {seed}"
    assert await sessions(empty_database, "idle in transaction%") == 0

    async def all_there() -> bool:
        return await sessions(empty_database, "%") <= 3

    await until(all_there, "no more sessions than the pool has room for")


async def test_waiting_for_a_connection_ends_with_503(empty_database: str) -> None:
    async with open_pool(ConnectSettings(dsn=empty_database), size=1, acquire_timeout_s=30.0) as pool:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with pool.acquire():
                entered.set()
                await leave.wait()

        holder = asyncio.create_task(hold())
        await entered.wait()
        pool._acquire_timeout_s = 0.05
        with pytest.raises(DatabaseUnavailable) as caught:
            async with pool.acquire():
                pytest.fail("there is only one connection")
        pool._acquire_timeout_s = 30.0
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
        leave.set()
        await holder
        async with pool.acquire() as conn:
            assert await conn.fetchval("select 1") == 1


async def test_a_task_never_holds_two(pool: ApiPool) -> None:
    async with pool.acquire() as conn:
        with pytest.raises(RuntimeError, match="already holds"):
            async with pool.acquire():
                pytest.fail("nested acquire")
        assert await conn.fetchval("select 1") == 1


async def test_a_transaction_left_open_is_cut_not_lent_on(pool: ApiPool, empty_database: str) -> None:
    async with pool.acquire() as conn:
        pid = conn.get_server_pid()
        await conn.execute("begin; create table left_open (id int)")
    assert await sessions(empty_database, "idle in transaction%") == 0
    async with pool.acquire() as conn:
        assert conn.get_server_pid() != pid
        assert not conn.is_in_transaction()
        assert await conn.fetchval("select to_regclass('left_open')") is None


async def test_giving_back_costs_no_round_trip_and_keeps_the_settings(pool: ApiPool) -> None:
    async with pool.acquire() as conn:
        pid = conn.get_server_pid()
        await conn.execute("set application_name = 'still-here'")
    async with pool.acquire() as conn:
        assert conn.get_server_pid() == pid
        assert await conn.fetchval("show application_name") == "still-here"
        last = "select query from pg_stat_activity where pid = pg_backend_pid()"
        assert await conn.fetchval(last) == last


async def test_a_body_that_fails_rolls_back_and_is_not_disguised(pool: ApiPool) -> None:
    async def work(conn: Connection) -> None:
        await conn.execute("create table once (id int primary key); insert into once values (1)")
        await conn.execute("insert into once values (1)")

    with pytest.raises(asyncpg.UniqueViolationError):
        await pool.run(work)
    async with pool.acquire() as conn:
        assert await conn.fetchval("select to_regclass('once')") is None


async def test_transactions_read_committed_data_whatever_the_default(pool: ApiPool) -> None:
    async with pool.acquire() as conn:
        await conn.execute("set default_transaction_isolation = 'serializable'")
        pid = conn.get_server_pid()
    async with pool.transaction() as conn:
        assert conn.get_server_pid() == pid
        assert await conn.fetchval("show transaction_isolation") == "read committed"


@pytest.mark.parametrize(("failures", "succeeds"), [(RETRIES, True), (RETRIES + 1, False)])
@pytest.mark.parametrize("code", ["40P01", "40001", "55P03"])
async def test_contention_is_retried_three_times(pool: ApiPool, code: str, failures: int, succeeds: bool) -> None:
    runs = 0

    async def work(conn: Connection) -> str:
        nonlocal runs
        runs += 1
        await conn.execute("create table if not exists runs (n int)")
        await conn.execute("insert into runs values (1)")
        if runs <= failures:
            await conn.execute(f"do $$ begin raise exception using errcode = '{code}'; end $$")
        return "done"

    if succeeds:
        assert await pool.run(work) == "done"
        async with pool.acquire() as conn:
            assert await conn.fetchval("select count(*) from runs") == 1
    else:
        with pytest.raises(DatabaseUnavailable):
            await pool.run(work)
    assert runs == RETRIES + 1


async def test_other_errors_are_not_retried(pool: ApiPool) -> None:
    runs = 0

    async def work(conn: Connection) -> None:
        nonlocal runs
        runs += 1
        await conn.execute("select 1 / 0")

    with pytest.raises(asyncpg.DivisionByZeroError):
        await pool.run(work)
    assert runs == 1


async def test_a_held_row_lock_gives_503_within_the_limit(empty_database: str) -> None:
    settings = ConnectSettings(dsn=empty_database, limits=LIMITS | {ConnKind.API: Limits(5_000, 20)})
    blocker = await asyncpg.connect(empty_database)
    await blocker.execute("create table rows (id int primary key); insert into rows values (1)")
    await blocker.execute("begin; update rows set id = 1")

    async def work(conn: Connection) -> None:
        await conn.execute("update rows set id = 1")

    async with open_pool(settings) as pool:
        with pytest.raises(DatabaseUnavailable):
            await pool.run(work)
        await blocker.execute("rollback")
        await pool.run(work)
    await blocker.close()


async def test_a_restarted_server_costs_one_503_per_connection(pool: ApiPool, empty_database: str) -> None:
    async def request() -> int:
        async with pool.acquire() as conn:
            return await conn.fetchval("select 1")

    assert await asyncio.gather(*(request() for _ in range(3))) == [1, 1, 1]
    admin = await asyncpg.connect(empty_database)
    await admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    await admin.close()
    outcomes = await asyncio.gather(*(request() for _ in range(3)), return_exceptions=True)
    assert all(outcome == 1 or isinstance(outcome, DatabaseUnavailable) for outcome in outcomes)
    assert await asyncio.gather(*(request() for _ in range(3))) == [1, 1, 1]


async def test_an_absent_server_is_503_and_the_pool_starts_all_the_same(unused_tcp_port: int) -> None:
    async with open_pool(ConnectSettings(dsn=f"postgresql://u:p@127.0.0.1:{unused_tcp_port}/d")) as pool:
        with pytest.raises(DatabaseUnavailable):
            async with pool.acquire():
                pytest.fail("nobody listens there")
        assert pool.in_use == 0


async def test_a_read_only_session_is_thrown_out(pool: ApiPool) -> None:
    async with pool.acquire() as conn:
        pid = conn.get_server_pid()
        await conn.execute("set default_transaction_read_only = on")

    async def work(conn: Connection) -> None:
        assert conn.get_server_pid() == pid
        await conn.execute("create table t (id int)")

    with pytest.raises(DatabaseUnavailable):
        await pool.run(work)
    async with pool.transaction() as conn:
        assert conn.get_server_pid() != pid
        await conn.execute("create table t (id int)")


async def test_a_silent_network_ends_at_the_time_out_and_not_later(empty_database: str) -> None:
    loop = asyncio.get_running_loop()
    limits = LIMITS | {ConnKind.API: Limits(200, 100)}
    async with proxied(empty_database) as (proxy, dsn):

        async def ask(pool: ApiPool) -> int:
            async with pool.acquire() as conn:
                return await conn.fetchval("select 1")

        async with open_pool(ConnectSettings(dsn=dsn, limits=limits, query_margin_s=0.1)) as pool:
            assert await ask(pool) == 1
            proxy.go_silent()
            started = loop.time()
            with pytest.raises(DatabaseUnavailable):
                await ask(pool)
            assert loop.time() - started < 10
            proxy.flow()

            async def answered() -> bool:
                with contextlib.suppress(DatabaseUnavailable):  # its time is short, also when all stands still
                    return await ask(pool) == 1
                return False

            await until(answered, "it is asked again")


async def test_leaving_a_cancelled_query_on_a_silent_network_takes_a_second_at_most(empty_database: str) -> None:
    loop = asyncio.get_running_loop()
    async with (
        proxied(empty_database) as (proxy, dsn),
        open_pool(ConnectSettings(dsn=dsn), acquire_timeout_s=30) as pool,
    ):
        sent = asyncio.Event()

        async def ask() -> None:
            async with pool.acquire() as conn:
                proxy.go_silent()
                sent.set()
                await conn.fetchval("select 1")

        asking = asyncio.create_task(ask())
        await sent.wait()
        started = loop.time()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert loop.time() - started < 15
        assert pool.in_use == 0


async def test_closing_does_not_wait_for_ever(empty_database: str) -> None:
    pool = ApiPool(ConnectSettings(dsn=empty_database))
    await pool.start()
    entered = asyncio.Event()

    async def hold() -> None:
        async with pool.acquire():
            entered.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await entered.wait()
    await pool.close(timeout_s=0.05)
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    await pool.close()
