"""One agent with hundreds of requests leaves room for the others. Source: field-reports B52."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from omnara.db.connection import ConnectSettings
from omnara.db.failures import DatabaseUnavailable
from omnara.db.fair_share import FairShare, in_background, work_for
from omnara.db.pool import API_CONNECTIONS, ApiPool
from omnara.ids import IdKind, decode, new_uuid
from tests.contract.server import ApiServer, api_server
from tests.contract.stream_client import open_stream
from tests.support.long_log import LongLog
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

MANY = 200


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    """Without a worker: messages stay in the queue."""
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def sql(server: ApiServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(server.deps.settings.database_url)
    yield connection
    await connection.close()


async def queued(server: ApiServer, agent: str, count: int) -> list[str]:
    return [(await server.say(agent, f"message {n}")).json["agent_input"]["id"] for n in range(count)]


async def test_a_locked_agent_holds_half_of_the_connections(server: ApiServer, sql: asyncpg.Connection) -> None:
    """Whatever holds its row for however long: requests for it wait, and another agent is served meanwhile."""
    busy, other = await server.agent(), await server.agent()
    (item,) = await queued(server, busy, 1)
    async with sql.transaction():
        await sql.execute("select 1 from agent_sched where agent_id = $1 for update", agent_id(busy))
        body = {"position": "front"}
        moves = [asyncio.create_task(server.call("POST", f"{busy}/inputs/{item}/move", body)) for _ in range(20)]
        await until(lambda: waiting(server), "two of them hold a connection")
        for _ in range(5):
            assert (await server.say(other, "hello")).status == 201
            assert (await server.call("GET", other)).status == 200
        assert await waiting(server), "they wait still"
        assert not any(move.done() for move in moves)
        for move in moves:
            move.cancel()
        await asyncio.gather(*moves, return_exceptions=True)


async def waiting(server: ApiServer) -> bool:
    """Whether exactly half of the API's connections wait for a row."""
    [row] = await server.rows(
        """select count(*) as found from pg_stat_activity where datname = current_database()
           and application_name = 'omnara:api' and wait_event_type = 'Lock'"""
    )
    return bool(row["found"] == API_CONNECTIONS // 2)


async def test_another_agent_is_not_behind_two_hundred_moves(server: ApiServer) -> None:
    busy, other = await server.agent(), await server.agent()
    items = await queued(server, busy, 20)
    await server.get(other)
    done = 0

    async def move(number: int) -> int:
        nonlocal done
        position = {"position": "back" if number % 2 else "front"}
        answer = await server.call("POST", f"{busy}/inputs/{items[number % 20]}/move", position)
        done += 1
        return answer.status

    moves = [asyncio.create_task(move(number)) for number in range(MANY)]
    await until(lambda: server.deps.db.in_use > 0 or done > 0, "they have begun")
    before = []
    for _ in range(3):
        assert (await server.call("GET", other)).status == 200
        before.append(done)
    statuses = await asyncio.gather(*moves)
    assert set(statuses) <= {200, 503}
    assert before[0] < MANY // 2, before


async def test_another_agent_is_not_behind_two_hundred_replays(server: ApiServer, sql: asyncpg.Connection) -> None:
    busy, other = await server.agent(), await server.agent()
    await LongLog(sql, agent_id(busy)).grow(75)
    done = 0

    async def replay(place: int) -> None:
        nonlocal done
        async with open_stream(server, busy, f"?after_sequence={place}") as stream:
            await stream.events(301 - place, within_s=60)
            done += 1

    replays = [asyncio.create_task(replay(place)) for place in range(50)]
    await until(lambda: server.deps.db.in_use > 0, "they have begun")
    for _ in range(3):
        assert (await server.call("GET", other)).status == 200
    before = done
    await asyncio.gather(*replays)
    assert before < done == 50
    await until(lambda: lent(server) == 0, "shares are forgotten with their last user")


def lent(server: ApiServer) -> int:
    """Agents that somebody works for at the database."""
    return len(server.deps.db._fair_share)


# --- the share itself -------------------------------------------------------------------------------------


async def test_at_most_half_of_a_pool_works_for_one_agent(empty_database: str) -> None:
    pool = ApiPool(ConnectSettings(dsn=empty_database), size=4, acquire_timeout_s=30.0)
    await pool.start()
    a, b = new_uuid(), new_uuid()
    most: dict[UUID | None, int] = {}
    now: dict[UUID | None, int] = {}

    async def work(agent: UUID | None) -> None:
        with work_for(agent):
            async with pool.acquire() as connection:
                now[agent] = now.get(agent, 0) + 1
                most[agent] = max(most.get(agent, 0), now[agent])
                await connection.fetchval("select pg_sleep(0.002)")
                now[agent] -= 1

    try:
        await asyncio.gather(*(work(agent) for agent in [a, None, b] * 60))
        await asyncio.gather(*(work(None) for _ in range(60)))
    finally:
        await pool.close()
    assert (most[a], most[b], most[None]) == (2, 2, 4)
    assert len(pool._fair_share) == 0


async def test_the_background_leaves_one_connection_to_requests(empty_database: str) -> None:
    pool = ApiPool(ConnectSettings(dsn=empty_database), size=3, acquire_timeout_s=30.0)
    await pool.start()
    go_on, held = asyncio.Event(), 0

    async def hold() -> None:
        nonlocal held
        async with pool.acquire():
            held += 1
            await go_on.wait()

    try:
        with in_background():
            holders = [asyncio.create_task(hold()) for _ in range(2)]
            await until(lambda: held == 2, "it has all that it may have")
            pool._acquire_timeout_s = 0.05
            with pytest.raises(DatabaseUnavailable, match="in the background"):
                await use(pool)
            pool._acquire_timeout_s = 30.0
            given_up = asyncio.create_task(use(pool))
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        assert [await use(pool) for _ in range(3)] == [1, 1, 1], "requests have the other one"
        go_on.set()
        await asyncio.gather(*holders)
        with in_background():
            await asyncio.gather(*(asyncio.create_task(use(pool)) for _ in range(20)))
            assert pool._background._value == 2
    finally:
        go_on.set()
        await pool.close()


async def test_waiting_for_a_turn_has_an_end_and_may_be_given_up(empty_database: str) -> None:
    pool = ApiPool(ConnectSettings(dsn=empty_database), size=2, acquire_timeout_s=0.2)
    await pool.start()
    try:
        with work_for(new_uuid()):
            async with pool.acquire():
                with pytest.raises(DatabaseUnavailable, match="too many requests for this agent"):
                    await asyncio.create_task(use(pool))
                given_up = asyncio.create_task(use(pool))
                await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                with work_for(None):
                    await asyncio.create_task(use(pool))
            await use(pool)
        assert len(pool._fair_share) == 0
    finally:
        await pool.close()


async def use(pool: ApiPool) -> Any:
    async with pool.acquire() as connection:
        return await connection.fetchval("select 1")


async def test_turns_are_first_come_first_served() -> None:
    share, order, agent = FairShare(1), list[int](), new_uuid()

    async def take(number: int) -> None:
        async with share.turn(agent, 5):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(number) for number in range(20)))
    assert order == list(range(20))


def agent_id(path: str) -> UUID:
    return decode(IdKind.AGENT, path.rsplit("/", 1)[1])
