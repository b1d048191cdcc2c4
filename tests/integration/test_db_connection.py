"""Every connection states its own rules, whatever a role or database defaults to."""

from __future__ import annotations

import socket
import uuid

import asyncpg
import msgspec
import pytest

from omnara.db.connection import LIMITS, TCP_USER_TIMEOUT_MS, ConnectSettings, ConnKind, Limits, connect
from omnara.db.failures import is_connection_loss
from tests.support.postgres import PostgresForTests

HOSTILE = {
    "synchronous_commit": "off",
    "default_transaction_isolation": "'repeatable read'",
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_session_timeout": "50",
    "idle_in_transaction_session_timeout": "0",
    "jit": "on",
    "plan_cache_mode": "force_generic_plan",
    "search_path": "pg_catalog",
    "timezone": "'Asia/Tokyo'",
}


async def make_hostile(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    name = await conn.fetchval("select current_database()")
    version = await conn.fetchval("select current_setting('server_version_num')::int")
    hostile = HOSTILE | ({"transaction_timeout": "2000"} if version >= 170000 else {})
    statements = [f"alter database {name} set {key} = {value}" for key, value in hostile.items()]
    await conn.execute("; ".join(statements))
    await conn.close()


@pytest.mark.parametrize("kind", list(ConnKind))
async def test_database_defaults_do_not_reach_a_session(empty_database: str, kind: ConnKind) -> None:
    await make_hostile(empty_database)
    settings = ConnectSettings(dsn=empty_database)
    conn = await connect(settings, kind)
    try:
        rows = await conn.fetch("select name, setting from pg_settings")
        actual = {row["name"]: row["setting"] for row in rows}
    finally:
        await conn.close()
    wanted = settings.session_settings(kind)
    if "transaction_timeout" in actual:
        wanted["transaction_timeout"] = "0"
    assert {name: actual[name].lower() for name in wanted} == {name: value.lower() for name, value in wanted.items()}
    assert actual["synchronous_commit"] == "on"
    assert actual["default_transaction_isolation"] == "read committed"
    assert actual["idle_in_transaction_session_timeout"] == "10000"
    assert int(actual["tcp_keepalives_idle"]) == 3


async def test_api_waits_two_seconds_for_a_lock() -> None:
    assert LIMITS[ConnKind.API].lock_ms == 2_000


async def test_both_ends_notice_a_dead_peer(empty_database: str) -> None:
    conn = await connect(ConnectSettings(dsn=empty_database), ConnKind.SAVER)
    try:
        sock = conn._transport.get_extra_info("socket")
        assert sock.family == socket.AF_INET
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == TCP_USER_TIMEOUT_MS
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
    finally:
        await conn.close()


async def test_a_read_only_server_is_refused(empty_database: str) -> None:
    conn = await asyncpg.connect(empty_database)
    name = await conn.fetchval("select current_database()")
    await conn.execute(f"alter database {name} set default_transaction_read_only = on")
    await conn.close()
    with pytest.raises(asyncpg.TargetServerAttributeNotMatched) as caught:
        await connect(ConnectSettings(dsn=empty_database), ConnKind.SESSION)
    assert is_connection_loss(caught.value)


async def test_json_stays_text_and_uuids_go_in_as_text(empty_database: str) -> None:
    conn = await connect(ConnectSettings(dsn=empty_database), ConnKind.API)
    try:
        key = uuid.uuid4()
        row = await conn.fetchrow(
            "select $1::json as j, $2::jsonb as b, $3::uuid as u", '{"b": 1,"a":2}', "[1]", str(key)
        )
        assert row is not None
        assert (row["j"], row["b"], row["u"]) == ('{"b": 1,"a":2}', "[1]", key)
    finally:
        await conn.close()


async def test_the_server_limits_fire_before_the_client_gives_up(empty_database: str) -> None:
    settings = ConnectSettings(dsn=empty_database, limits=LIMITS | {ConnKind.API: Limits(50, 50)})
    conn = await connect(settings, ConnKind.API)
    try:
        with pytest.raises(asyncpg.QueryCanceledError):
            await conn.fetchval("select pg_sleep(5)")
    finally:
        await conn.close()


async def test_the_grace_after_a_start_is_short_only_when_embedded(postgres: PostgresForTests) -> None:
    settings = ConnectSettings(dsn=postgres.admin_dsn)
    assert settings.start_grace_s == 10.0
    assert msgspec.structs.replace(settings, embedded=True).start_grace_s == 1.0
