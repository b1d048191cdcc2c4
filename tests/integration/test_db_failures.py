"""Real errors of a real server, and what each of them means."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import (
    DatabaseUnavailable,
    as_unavailable,
    is_connection_loss,
    is_data_error,
    is_definite_sql_error,
    is_retryable,
    is_unavailability,
)
from tests.support.waiting import until


async def error_of(conn: Connection, sql: str, *args: object) -> Exception:
    with pytest.raises(Exception) as caught:
        await conn.fetch(sql, *args)
    return caught.value


@pytest.fixture
async def conn(empty_database: str):
    connection = await connect(ConnectSettings(dsn=empty_database), ConnKind.SAVER)
    await connection.execute("create table t (id int primary key, v text not null, n numeric check (n < 10))")
    await connection.execute("insert into t values (1, 'a', 1)")
    yield connection
    connection.terminate()


@pytest.mark.parametrize(
    ("sql", "args"),
    [
        ("insert into t values (2, $1, 1)", ("a\0b",)),
        ("insert into t values (2, $1, 1)", ("\ud800",)),
        ("insert into t values (2, $1, 1)", (5,)),
        ("insert into t values (1, 'again', 1)", ()),
        ("insert into t values (2, null, 1)", ()),
        ("insert into t values (2, 'x', 11)", ()),
        ("select $1::jsonb", ("{",)),
        ("select $1::jsonb", ('"\\u0000"',)),
        ("select 1 / 0", ()),
    ],
)
async def test_bad_content_is_the_data_s_fault_and_definite(
    conn: Connection, sql: str, args: tuple[object, ...]
) -> None:
    error = await error_of(conn, sql, *args)
    assert is_data_error(error)
    assert is_definite_sql_error(error)
    assert not is_connection_loss(error)
    assert not is_unavailability(error)
    assert await conn.fetchval("select count(*) from t") == 1


async def test_a_missing_table_is_a_bug_and_nothing_else(conn: Connection) -> None:
    error = await error_of(conn, "select * from nowhere")
    assert is_definite_sql_error(error)
    assert [check(error) for check in (is_data_error, is_retryable, is_connection_loss, is_unavailability)] == [
        False
    ] * 4


async def test_a_lock_time_out_may_be_tried_again(conn: Connection, empty_database: str) -> None:
    other = await asyncpg.connect(empty_database)
    try:
        await other.execute("begin; update t set v = 'b'")
        await conn.execute("set lock_timeout = '30ms'")
        error = await error_of(conn, "update t set v = 'c'")
    finally:
        other.terminate()
    assert is_retryable(error)
    assert is_definite_sql_error(error)
    assert is_unavailability(error)


async def test_a_terminated_backend_is_a_loss_and_unknown(conn: Connection, empty_database: str) -> None:
    other = await asyncpg.connect(empty_database)
    sleeping = asyncio.create_task(conn.fetch("select pg_sleep(30)"))
    pid = conn.get_server_pid()

    async def is_active() -> bool:
        return await other.fetchval("select state = 'active' from pg_stat_activity where pid = $1", pid)

    await until(is_active, "the statement runs")
    await other.execute("select pg_terminate_backend($1)", pid)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await sleeping
    await other.close()
    assert is_connection_loss(caught.value)
    assert not is_definite_sql_error(caught.value)
    later = await error_of(conn, "select 1")
    assert is_connection_loss(later)


async def test_a_client_time_out_is_unknown(conn: Connection) -> None:
    with pytest.raises(TimeoutError) as caught:
        await conn.fetch("select pg_sleep(30)", timeout=0.02)
    assert not is_definite_sql_error(caught.value)
    assert is_unavailability(caught.value)
    assert not is_connection_loss(caught.value)


async def test_a_refused_connection_is_a_loss(unused_tcp_port: int) -> None:
    with pytest.raises(OSError) as caught:
        await connect(ConnectSettings(dsn=f"postgresql://u:p@127.0.0.1:{unused_tcp_port}/d"), ConnKind.API)
    assert is_connection_loss(caught.value)


async def test_a_read_only_session_is_to_be_replaced(conn: Connection) -> None:
    await conn.execute("set default_transaction_read_only = on")
    error = await error_of(conn, "insert into t values (3, 'x', 1)")
    assert is_connection_loss(error)
    assert is_definite_sql_error(error)


async def test_cancellation_is_unknown() -> None:
    assert not is_definite_sql_error(asyncio.CancelledError())


async def test_the_wrapped_error_says_what_but_not_the_server_s_words(conn: Connection) -> None:
    error = await error_of(conn, "insert into t values (1, 'secret value', 1)")
    with pytest.raises(DatabaseUnavailable) as caught:
        raise as_unavailable(error, "saving") from error
    assert "23505" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not is_connection_loss(caught.value)
