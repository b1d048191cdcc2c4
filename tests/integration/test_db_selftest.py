"""The self test passes on a good database and names what is wrong with a bad one."""

from __future__ import annotations

import os

import asyncpg
import pytest

from omnara.db import selftest
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.selftest import CheckResult, connection_room, run_selftest
from tests.support.transaction_pooler import pooled


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


async def test_a_good_database_passes(empty_database: str) -> None:
    results = by_name(await run_selftest(ConnectSettings(dsn=empty_database)))
    durability = results.pop("durability")
    assert durability.ok or "off" in durability.detail
    assert [result for result in results.values() if not result.ok or result.fix] == []
    assert {"version", "connections", "session settings", "pooler", "advisory locks", "notifications"} <= set(results)


async def test_an_absent_database_is_one_finding(unused_tcp_port: int) -> None:
    results = await run_selftest(ConnectSettings(dsn=f"postgresql://u:secret@127.0.0.1:{unused_tcp_port}/d"))
    assert [(result.name, result.ok) for result in results] == [("connection", False)]
    assert results[0].fix
    assert "secret" not in repr(results)


async def test_a_role_that_may_not_create_is_told(empty_database: str) -> None:
    role = f"visitor_{os.getpid()}"
    conn = await asyncpg.connect(empty_database)
    await conn.execute(f"create role {role} login password 'v'")
    await conn.execute("revoke create on schema public from public")
    try:
        dsn = empty_database.replace(empty_database.split("//")[1].split("@")[0], f"{role}:v")
        results = by_name(await run_selftest(ConnectSettings(dsn=dsn)))
        assert not results["schema"].ok
        assert "grant" in results["schema"].fix
    finally:
        await conn.execute(f"drop owned by {role}; drop role {role}")
        await conn.close()


async def test_a_setting_that_is_changed_on_the_way_is_found(empty_database: str) -> None:
    settings = ConnectSettings(dsn=empty_database)
    conn = await connect(settings, ConnKind.SESSION)
    try:
        await conn.execute("set synchronous_commit = off")
        result = by_name(await selftest.check_session(conn, settings))["session settings"]
        assert not result.ok
        assert "synchronous_commit" in result.detail
    finally:
        await conn.close()


async def test_a_lock_that_stays_behind_is_found(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Connection] = []
    real = selftest.try_hold_shared

    async def also_elsewhere(conn: Connection, key: int) -> bool:
        kept.append(await connect(ConnectSettings(dsn=empty_database), ConnKind.SESSION))
        await real(kept[0], key)
        return await real(conn, key)

    monkeypatch.setattr(selftest, "try_hold_shared", also_elsewhere)
    result = await selftest.check_locks(ConnectSettings(dsn=empty_database))
    kept[0].terminate()
    assert not result.ok


async def test_lost_notifications_are_found(empty_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_NOTIFY_LIMIT_S", 0.05)
    monkeypatch.setattr(selftest, "_SQL", {"notify": "select $1::text"})
    result = await selftest.check_notifications(ConnectSettings(dsn=empty_database))
    assert not result.ok


async def test_a_pooler_shows_up_as_a_finding(empty_database: str) -> None:
    async with pooled(empty_database) as dsn:
        results = await run_selftest(ConnectSettings(dsn=dsn))
    assert not all(result.ok for result in results)


async def test_the_room_that_is_left_is_counted(empty_database: str) -> None:
    conns = [await asyncpg.connect(empty_database) for _ in range(3)]
    conn = await connect(ConnectSettings(dsn=empty_database), ConnKind.ADMIN)
    free, limit = await connection_room(conn)
    assert 0 < free <= limit - len(conns) - 1
    for opened in [*conns, conn]:
        await opened.close()
