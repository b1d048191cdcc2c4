"""Hints over a real server: merged, sent after commit, heard again after every loss. Field reports B48, B49, B50."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg
import pytest

from omnara.db.bus import Kind, LocalBus, Subscription
from omnara.db.connection import Connection, ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.hints import MAX_DELTA_BYTES, MAX_IDS, HintListener, HintSender
from omnara.db.hintwire import CHANNEL
from omnara.db.sqlfiles import Queries
from tests.support.tcp_proxy import proxied
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def running(*services: HintSender | HintListener) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(service.run()) for service in services]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


class Replica:
    """One process's end of the hints."""

    def __init__(self, dsn: str, origin: str, heartbeat_s: float = 5.0) -> None:
        self.settings = ConnectSettings(dsn=dsn)
        self.bus = LocalBus()
        self.lost = 0
        self.session = Dedicated(self.settings, ConnKind.SESSION)
        self.sender = HintSender(self.session, self.bus, origin=origin)
        self.listener = HintListener(
            self.settings, self.bus, origin=origin, on_lost=self._on_lost, heartbeat_s=heartbeat_s
        )

    def _on_lost(self) -> None:
        self.lost += 1

    async def listening(self) -> Subscription:
        """Subscribe to everything once the first look-again is over."""
        await self.listener.wait_listening()
        return self.bus.subscribe(list(Kind))


async def drain(subscription: Subscription, kind: Kind, wanted: set[str]) -> None:
    seen: set[str] = set()
    async with asyncio.timeout(20):
        while not wanted <= seen:
            seen |= (await subscription.get()).ids.get(kind, frozenset())
    assert seen == wanted


@contextlib.asynccontextmanager
async def two_replicas(dsn: str) -> AsyncIterator[tuple[Replica, Replica]]:
    left, right = Replica(dsn, "left"), Replica(dsn, "right")
    async with running(left.sender, left.listener, right.sender, right.listener):
        yield left, right
    await left.session.close()
    await right.session.close()


async def test_another_process_hears_and_the_own_one_only_once(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there, here = await right.listening(), await left.listening()
        left.sender.ready(["a", "b"])
        assert here.take().ids == {Kind.READY: {"a", "b"}}
        await drain(there, Kind.READY, {"a", "b"})
        right.sender.cancel(["z"])
        assert (await here.get()).ids == {Kind.CANCEL: {"z"}}


async def test_all_kinds_travel_and_deltas_keep_their_order(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        left.sender.events(["e"])
        left.sender.subscribers(["s"])
        for number in range(300):
            left.sender.delta("a", f"{number}:{'x' * 50}")
        texts: list[str] = []
        ids: dict[Kind, frozenset[str]] = {}
        async with asyncio.timeout(20):
            while len(texts) < 300:
                batch = await there.get()
                ids |= batch.ids
                texts += [hint.text.partition(":")[0] for hint in batch.deltas]
        assert texts == [str(number) for number in range(300)]
        assert ids == {Kind.EVENTS: {"e"}, Kind.SUBSCRIBERS: {"s"}}
        assert left.sender.commits <= 2


async def test_at_most_twenty_notifying_commits_a_second(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        loop = asyncio.get_running_loop()
        started = loop.time()
        names = {str(number) for number in range(400)}
        for name in sorted(names):
            left.sender.ready([name])
            await asyncio.sleep(0.001)
        await drain(there, Kind.READY, names)
        assert left.sender.commits <= (loop.time() - started) * 20 + 2
        assert left.sender.commits >= 3


async def test_a_quiet_process_does_not_wait_for_company(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        loop = asyncio.get_running_loop()
        delays = []
        for number in range(9):
            await asyncio.sleep(0.06)
            started = loop.time()
            left.sender.ready([str(number)])
            await drain(there, Kind.READY, {str(number)})
            delays.append(loop.time() - started)
        assert sorted(delays)[4] < 0.03


async def test_only_the_notifying_commit_is_asynchronous(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        left.sender.ready(["a"])
        await drain(there, Kind.READY, {"a"})
        async with left.session.use() as conn:
            assert await conn.fetchval("show synchronous_commit") == "on"
            await conn.execute("create table probe (v text)")
            await conn.execute(
                "create function note() returns int language sql as"
                " $$ insert into probe values (current_setting('synchronous_commit')); select 1 $$"
            )
            sql = Queries("hints")["notify"].replace("from unnest", ", note() from unnest")
            await conn.fetch(sql, CHANNEL, ["x"])
            assert await conn.fetchval("select v from probe") == "off"


async def test_ten_thousand_ids_become_everything(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        left.sender.ready([str(number) for number in range(MAX_IDS + 1)])
        async with asyncio.timeout(20):
            batch = await there.get()
        assert batch.everything == {Kind.READY}


async def test_deltas_over_the_bound_are_dropped_and_counted(empty_database: str) -> None:
    replica = Replica(empty_database, "o")
    for _ in range(MAX_DELTA_BYTES // 5_000 + 10):
        replica.sender.delta("a", "x" * 5_000)
    replica.sender.delta("a", "y" * 8_000)
    assert replica.sender.dropped >= 10


async def kill_listeners(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    await conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name like '%:listen'"
    )
    await conn.close()


async def test_a_terminated_listener_comes_back_and_looks_again(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        await left.listening()
        await kill_listeners(empty_database)
        async with asyncio.timeout(20):
            batch = await there.get()
        assert Kind.READY in batch.everything
        assert Kind.EVENTS in batch.everything
        assert (right.listener.connects, right.lost) == (2, 1)
        left.sender.ready(["later"])
        await drain(there, Kind.READY, {"later"})


async def test_a_silent_network_is_noticed_by_the_heartbeat(empty_database: str) -> None:
    async with proxied(empty_database) as (proxy, dsn):
        replica = Replica(dsn, "o", heartbeat_s=0.1)
        async with running(replica.listener):
            there = await replica.listening()
            proxy.go_silent()
            await until(lambda: not replica.listener.connected, "the silence is noticed", limit_s=20)
            proxy.flow()
            async with asyncio.timeout(20):
                assert Kind.READY in (await there.get()).everything


async def test_a_connection_that_no_longer_listens_is_replaced(empty_database: str) -> None:
    replica = Replica(empty_database, "o", heartbeat_s=0.05)
    conns: list[Connection] = []

    async def on_connect(conn: Connection) -> None:
        conns.append(conn)

    listener = HintListener(replica.settings, replica.bus, origin="o", on_connect=on_connect, heartbeat_s=0.05)
    async with running(listener):
        await listener.wait_listening()
        await conns[0].execute("unlisten *")
        await until(lambda: listener.connects >= 2, "a new connection listens")


async def test_a_listener_holds_no_transaction_and_no_snapshot(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        await left.listening()
        await right.listening()
        conn = await asyncpg.connect(empty_database)
        rows = await conn.fetch(
            "select state, backend_xmin from pg_stat_activity"
            " where datname = current_database() and application_name like '%:listen'"
        )
        await conn.close()
        assert [(row["state"], row["backend_xmin"]) for row in rows] == [("idle", None)] * 2


async def test_foreign_text_on_the_channel_is_counted_and_ignored(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, right):
        there = await right.listening()
        conn = await asyncpg.connect(empty_database)
        await conn.execute(f"notify {CHANNEL}, 'hello'")
        await conn.close()
        await until(lambda: right.listener.unreadable == 1, "the text arrived")
        left.sender.ready(["a"])
        await drain(there, Kind.READY, {"a"})


async def test_a_lost_session_drops_hints_but_not_the_sender(empty_database: str) -> None:
    async with proxied(empty_database) as (proxy, dsn):
        replica, other = Replica(dsn, "o"), Replica(empty_database, "p")
        async with running(replica.sender, other.listener):
            there = await other.listening()
            replica.sender.ready(["a"])
            await drain(there, Kind.READY, {"a"})
            proxy.go_silent()
            proxy.cut()
            replica.sender.ready(["lost"])
            await until(lambda: replica.sender.dropped == 1, "the hint is given up")
            proxy.flow()
            seen: set[str] = set()

            def heard() -> bool:
                replica.sender.ready(["c"])  # again, since it may get lost too when all stands still
                seen.update(there.take().ids.get(Kind.READY, frozenset()))
                return "c" in seen

            await until(heard, "hints get through again")
            assert seen <= {"lost", "c"}
        await replica.session.close()


async def test_a_hook_that_fails_is_tried_again(empty_database: str) -> None:
    tries = 0

    async def on_connect(_conn: Connection) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionError("not yet")

    listener = HintListener(ConnectSettings(dsn=empty_database), LocalBus(), origin="o", on_connect=on_connect)
    async with running(listener):
        async with asyncio.timeout(20):
            await listener.wait_listening()
    assert (tries, listener.connects) == (2, 1)
    assert not listener.connected


async def test_stopping_leaves_no_session(empty_database: str) -> None:
    async with two_replicas(empty_database) as (left, _right):
        await left.listening()
    conn = await asyncpg.connect(empty_database)

    async def none_left() -> bool:
        return await conn.fetchval(
            "select count(*) = 1 from pg_stat_activity"
            " where datname = current_database() and backend_type = 'client backend'"
        )

    await until(none_left, "all sessions ended")
    await conn.close()


@pytest.mark.parametrize("size", [7_999, 8_000])
async def test_the_server_s_limit_is_where_we_think_it_is(empty_database: str, size: int) -> None:
    conn = await asyncpg.connect(empty_database)
    try:
        if size < 8_000:
            await conn.execute("select pg_notify('c', $1)", "x" * size)
        else:
            with pytest.raises(asyncpg.InvalidParameterValueError):
                await conn.execute("select pg_notify('c', $1)", "é" * (size // 2))
    finally:
        await conn.close()
