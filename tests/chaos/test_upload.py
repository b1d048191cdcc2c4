"""`kill -9` of the API process while a file arrives and is stored: the repetition makes one message with one file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import msgspec
import pytest

from omnara.client import Client
from omnara.testing import say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.pictures import block, png
from tests.support.processes import ServerProcess
from tests.support.waiting import until


@contextlib.asynccontextmanager
async def no_pieces(cluster: Cluster) -> AsyncIterator[None]:
    """Hold up the transaction that writes a content after its first row; nothing is changed."""
    connection = await asyncpg.connect(cluster.dsn)
    try:
        async with connection.transaction():
            await connection.execute("lock table artifact_chunks in share mode")
            yield
    finally:
        await connection.close()


@pytest.mark.parametrize("moment", ["arriving", "storing", "referring"])
async def test_during_an_upload(cluster: Cluster, client: Client, moment: str) -> None:
    """Half of the body has arrived; its content is being written; it is written, and the message is not."""
    picture = png(600, 400, padding=1_300_000 + len(moment))  # three pieces, and not those of another moment
    worker = await cluster.only_worker()
    (first,) = await cluster.start(roles="api")
    agent = await cluster.agent(client, say("hello"), say("seen"))
    await agent.settled()
    body = msgspec.json.encode({"content_blocks": [block(picture), {"type": "text", "text": "look"}]})
    held = {"arriving": contextlib.AsyncExitStack, "storing": lambda: no_pieces(cluster), "referring": agent.locked}
    async with held[moment]():
        arrives = asyncio.Event()
        sending = asyncio.create_task(sent(first, agent, body, arrives, whole=moment != "arriving"))
        await arrives.wait()
        if moment != "arriving":
            await until(cluster.waits_for_a_lock, "the upload waits in the database")
        first.kill_main()
        with pytest.raises(aiohttp.ClientError):
            await sending
    assert await waiting(cluster, agent) == (0, 0)
    again = cluster.make("api", ports=first.ports)
    await again.start()
    assert [await sent(again, agent, body, asyncio.Event()) for _ in range(2)] == [201, 200]
    await agent.asked(2)
    await agent.settled()
    assert await waiting(cluster, agent) == (1, 1)
    assert len(agent.requests) == 2
    assert (await agent.texts())[-1] == "seen"
    query = "select sum(octet_length(data)) from artifact_chunks where digest = $1"
    pieces = await cluster.sql.fetchval(query, hashlib.sha256(picture).digest())
    assert pieces == len(picture), "stored once, however often it was sent"
    again.kill()
    cluster.keep(worker)


async def sent(
    replica: ServerProcess, agent: Handle, body: bytes, arrives: asyncio.Event, *, whole: bool = True
) -> int:
    """Send the message with its file under one key, or only the first half of it; the status of the answer."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body) if whole else len(body) // 2, 65536):
            yield body[start : start + 65536]
        arrives.set()
        if not whole:
            await asyncio.Event().wait()

    headers = {
        "Authorization": agent.client._http.headers["Authorization"],
        "Content-Type": "application/json",
        "Idempotency-Key": f"upload {agent.id}",
    }
    path = (await agent.client.links(agent.id)).inputs
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
        session.post(f"{replica.url}{path}", data=pieces()) as response,
    ):
        await response.read()
        return response.status


async def waiting(cluster: Cluster, agent: Handle) -> tuple[int, int]:
    """How many messages with the key, and files, the agent has."""
    query = """select (select count(*) from inputs where agent_id = $1 and idempotency_key like 'upload %'),
                      (select count(*) from artifacts where agent_id = $1)"""
    row = await cluster.sql.fetchrow(query, agent.uuid)
    assert row is not None
    return row[0], row[1]
