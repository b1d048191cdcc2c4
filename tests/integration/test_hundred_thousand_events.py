"""An agent with a hundred thousand events: what is asked of it takes no more time or memory than of a short one.

Source: field-reports B33.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import asyncpg
import psutil
import pytest
import pytest_asyncio

from omnara.ids import IdKind, decode
from omnara.testing import embed, embedded, say
from tests.contract.server import ApiServer, api_server, model_server
from tests.support.long_log import LongLog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS = 25_000
MIB = 2**20
LIMIT_S = 0.3
"""Source: field-reports B33 (each well under 300 ms)."""
TEXT = "".join(chr(97 + number * number % 26) for number in range(1000))
"""Of three in four events: the log has about 80 MiB."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: Any) -> AsyncIterator[ApiServer]:
    async with (
        postgres.fresh() as dsn,
        model_server(embedded) as model,
        api_server(dsn, model) as running,
    ):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def agent(server: ApiServer) -> str:
    """The path of the agent. Its newest checkpoint is some hundred events back."""
    path = await server.agent()
    agent_id: UUID = decode(IdKind.AGENT, path.rsplit("/", 1)[1])
    sql = await asyncpg.connect(server.deps.settings.database_url)
    try:
        log = LongLog(sql, agent_id)
        await log.grow(TURNS - 200, text=TEXT)
        await log.checkpoint((TURNS - 200) * 4 + 1)
        await log.grow(200, text=TEXT)
        await sql.execute("analyze")
    finally:
        await sql.close()
    return path


@contextmanager
def within(mib: int) -> Iterator[None]:
    """Fail when the block makes the process hold more than so much more memory at any moment."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        grown = tracemalloc.get_traced_memory()[1] - before
        assert grown < mib * MIB, f"{grown / MIB:.1f} MiB"
    finally:
        tracemalloc.stop()


async def median_s(server: ApiServer, path: str) -> float:
    """Of five answers, the first one not counted."""
    await server.get(path)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        await server.get(path)
        times.append(time.perf_counter() - start)
    return sorted(times)[2]


async def test_every_read_is_quick(server: ApiServer, agent: str) -> None:
    flat = f"/agents/{agent.rsplit('/', 1)[1]}"
    paths = [
        f"{agent}/events?limit=50",
        f"{agent}/events?limit=50&after_sequence=50000",
        f"{agent}/turns?limit=50",
        f"{agent}/tool-calls?state=ready",
        agent,
        f"{server.scope}/agents",
        flat,
    ]
    times = {path.removeprefix(agent): await median_s(server, path) for path in paths}
    assert {path: round(seconds, 3) for path, seconds in times.items() if seconds > LIMIT_S} == {}


async def test_a_page_takes_the_memory_of_a_page(server: ApiServer, agent: str) -> None:
    with within(16):
        for after in (0, 50_000, 99_000):
            await server.get(f"{agent}/events?limit=100&after_sequence={after}")


async def test_a_stream_from_the_start_takes_the_memory_of_a_few_pages(server: ApiServer, agent: str) -> None:
    headers = {"Authorization": f"Bearer {server.key}", "Last-Event-ID": "0"}
    process = psutil.Process()
    before, most, tail = process.memory_info().rss, 0, b""
    async with server.session.get(f"{server.url}{agent}/events/stream", headers=headers, timeout=None) as response:
        assert response.status == 200
        async with asyncio.timeout(120):
            async for chunk in response.content.iter_any():
                most = max(most, process.memory_info().rss)
                tail = (tail + chunk)[-4096:]
                if b"id: %d\n" % (TURNS * 4) in tail:
                    break
    assert most - before < 64 * MIB, f"{(most - before) / MIB:.1f} MiB"


async def test_a_stream_near_the_end_starts_at_once(server: ApiServer, agent: str) -> None:
    headers = {"Authorization": f"Bearer {server.key}", "Last-Event-ID": str(TURNS * 4 - 10)}
    times = []
    for _ in range(3):
        start = time.perf_counter()
        async with server.session.get(f"{server.url}{agent}/events/stream", headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"id: "):
                    break
        times.append(time.perf_counter() - start)
    assert sorted(times)[1] < LIMIT_S


async def test_a_message_is_answered_from_the_checkpoint_on(server: ApiServer, agent: str) -> None:
    with within(48):
        await server.say(agent, embed(say("cold")))
        assert (await server.settled(agent))["output"] == "cold"
    times = []
    for word in ("warm", "still", "and on"):
        start = time.perf_counter()
        await server.say(agent, embed(say(word)))
        assert (await server.settled(agent))["output"] == word
        times.append(time.perf_counter() - start)
    assert sorted(times)[1] < LIMIT_S
