"""Advisory locks say who is alive, and no statement ever waits for one. Source: coordination §1."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.locks import (
    free_keys,
    held,
    hold_identity,
    lock_key,
    release,
    try_hold,
    try_hold_shared,
    worker_key,
)
from tests.support.waiting import until

ADVISORY = (
    "select count(*) from pg_locks where locktype = 'advisory'"
    " and database = (select oid from pg_database where datname = current_database())"
)


@pytest.fixture
async def conns(empty_database: str) -> AsyncIterator[list[Connection]]:
    settings = ConnectSettings(dsn=empty_database)
    opened = [await connect(settings, ConnKind.SESSION) for _ in range(3)]
    yield opened
    for conn in opened:
        conn.terminate()


def test_keys_are_the_same_everywhere_and_fit_the_server() -> None:
    assert lock_key("leader", "maintenance") == 8031945470485667036
    keys = {lock_key(space, str(n)) for space in ("worker", "leader") for n in range(20_000)}
    assert len(keys) == 40_000
    assert all(0 <= key < 2**63 for key in keys)


async def test_a_worker_is_gone_only_when_both_connections_are(conns: list[Connection]) -> None:
    session, listen, prober = conns
    key = worker_key(uuid.uuid4())
    assert await hold_identity(session, key)
    assert await hold_identity(listen, key)
    assert await free_keys(prober, {"w": key}) == []
    session.terminate()

    async def one_holder() -> bool:
        return await prober.fetchval(f"{ADVISORY} and granted") == 1

    await until(one_holder, "the server has ended the first connection")
    assert await free_keys(prober, {"w": key}) == []
    listen.terminate()

    async def gone() -> bool:
        return await free_keys(prober, {"w": key}) == ["w"]

    await until(gone, "both connections ended")


async def test_one_statement_looks_at_all_and_leaves_no_lock(conns: list[Connection]) -> None:
    holder, _, prober = conns
    keys = {n: lock_key("worker", str(n)) for n in range(50)}
    for n in range(0, 50, 2):
        assert await try_hold_shared(holder, keys[n])
    assert await free_keys(prober, keys) == list(range(1, 50, 2))
    assert await free_keys(prober, {}) == []
    assert await prober.fetchval(f"{ADVISORY} and pid = pg_backend_pid()") == 0


async def test_probing_a_living_worker_never_waits(conns: list[Connection]) -> None:
    holder, other, prober = conns
    key = lock_key("worker", "alive")
    assert await try_hold(holder, key)
    async with asyncio.timeout(20):
        assert await free_keys(prober, {"w": key}) == []
        assert not await try_hold(other, key)
        assert not await try_hold_shared(other, key)


async def test_an_identity_waits_out_a_prober_but_not_a_declarer(conns: list[Connection]) -> None:
    worker, declarer, _ = conns
    key = lock_key("worker", "again")
    await declarer.execute("begin")
    assert await declarer.fetchval("select pg_try_advisory_xact_lock($1)", key)
    assert not await hold_identity(worker, key, timeout_s=0.1)
    taking = asyncio.create_task(hold_identity(worker, key, timeout_s=30))
    await asyncio.sleep(0.03)
    assert not taking.done()
    await declarer.execute("commit")
    assert await taking


async def test_a_poller_pins_nothing_while_it_waits(conns: list[Connection]) -> None:
    holder, poller, observer = conns
    key = lock_key("leader", "test")
    waits: list[str] = []
    assert await try_hold(holder, key)

    async def lead() -> str:
        async with held(poller, key, timeout_s=30, poll_s=0.02, on_wait=lambda: waits.append("waiting")):
            return "leader"

    leading = asyncio.create_task(lead())
    await until(lambda: bool(waits), "the poller found the lock taken")
    blocked = f"{ADVISORY} and not granted"
    pinned = "select count(*) from pg_stat_activity where pid = $1 and backend_xmin is not null"
    samples = []
    for _ in range(60):
        assert await observer.fetchval(blocked) == 0
        samples.append(await observer.fetchval(pinned, poller.get_server_pid()))
    assert sum(samples) < len(samples) / 2
    assert await release(holder, key)
    assert await leading == "leader"
    assert waits == ["waiting"]
    assert await try_hold(observer, key)


async def test_polling_ends_at_its_limit(conns: list[Connection]) -> None:
    holder, poller, _ = conns
    key = lock_key("leader", "limit")
    assert await try_hold(holder, key)
    with pytest.raises(TimeoutError):
        async with held(poller, key, timeout_s=0.1, poll_s=0.02):
            pytest.fail("the lock is taken")


async def test_a_held_lock_survives_its_body_s_broken_connection(conns: list[Connection], empty_database: str) -> None:
    holder, other, _ = conns
    key = lock_key("leader", "broken")

    async def lead() -> None:
        async with held(holder, key, timeout_s=1):
            killer = await asyncpg.connect(empty_database)
            await killer.execute("select pg_terminate_backend($1, 5000)", holder.get_server_pid())
            await killer.close()
            await holder.fetchval("select 1")

    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await lead()
    assert await try_hold(other, key)
