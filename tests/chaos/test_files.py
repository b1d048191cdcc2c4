"""`kill -9` of an API process while it takes in a file: either the message is there with its file, or nothing is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator

import asyncpg
import msgspec
import pytest

from omnara.client import Client, ServerUnreachable
from omnara.db.connection import ConnectSettings
from omnara.db.pool import ApiPool
from omnara.engine.artifacts_store import Blobs
from omnara.testing import say
from tests.support.agent_handle import Handle
from tests.support.cluster import Cluster
from tests.support.pictures import png
from tests.support.processes import ServerProcess
from tests.support.waiting import until

WIDTHS = itertools.count(60)


class Sent(msgspec.Struct):
    """A picture that no other test sends, on its way to an agent through a process that is to be killed."""

    agent: Handle
    worker: ServerProcess
    doomed: ServerProcess
    client: Client
    data: bytes

    @property
    def digest(self) -> bytes:
        """By which it is known in the database."""
        return hashlib.sha256(self.data).digest()

    async def by(self, client: Client) -> str:
        """Send it; return the id of the message."""
        encoded = base64.b64encode(self.data).decode()
        file = {"type": "media", "media_type": "image/png", "data": encoded}
        return (await client.send(self.agent.id, "look", attachments=[file], key=f"file-{self.agent.id}")).id


async def test_killed_with_half_of_the_content_written(cluster: Cluster, client: Client) -> None:
    """The content's own transaction is rolled back."""
    sent = await sending(cluster, client)
    async with locked(cluster, "lock table artifact_chunks in share row exclusive mode"):
        await killed(cluster, sent)
    assert await counts(cluster, sent) == (0, 0, 0)
    await repeated(cluster, client, sent)


async def test_killed_between_the_content_and_the_message(cluster: Cluster, client: Client) -> None:
    """The content is there, nothing refers to it, and the repeated request makes use of it."""
    sent = await sending(cluster, client)
    async with sent.agent.locked():
        await killed(cluster, sent)
    assert await counts(cluster, sent) == (1, -(-len(sent.data) // (512 * 1024)), 0)
    await repeated(cluster, client, sent)
    assert await swept(cluster) == 0, "it belongs to an agent now"


async def test_a_content_that_nobody_comes_back_for_is_removed(cluster: Cluster, client: Client) -> None:
    """The sweep takes the content and all its chunks, and leaves what an agent has."""
    sent = await sending(cluster, client)
    async with sent.agent.locked():
        await killed(cluster, sent)
    assert await swept(cluster) == 1
    assert await counts(cluster, sent) == (0, 0, 0)
    await repeated(cluster, client, sent)


async def sending(cluster: Cluster, client: Client) -> Sent:
    """An agent at rest, a file for it, and a process to send it through."""
    worker = await cluster.only_worker()
    (doomed,) = await cluster.start(roles="api")
    agent = await cluster.agent(client, say("one"), say("two"))
    await agent.settled()
    return Sent(agent, worker, doomed, cluster.client(doomed, retry_for_s=0), png(next(WIDTHS), 40, padding=2_000_000))


async def killed(cluster: Cluster, sent: Sent) -> None:
    """Send, wait until the process waits for the lock that the test holds, and kill it."""
    task = asyncio.create_task(sent.by(sent.client))
    await until(lambda: waits(cluster), "the request waits for a lock")
    sent.doomed.kill()
    with pytest.raises(ServerUnreachable):
        await task


async def repeated(cluster: Cluster, client: Client, sent: Sent) -> None:
    """Send the same again through a living process: it counts once, and the model sees the file."""
    ids = {await sent.by(client) for _ in range(2)}
    assert len(ids) == 1
    await sent.agent.settled()
    assert (await sent.agent.texts())[-1] == "two"
    blobs, _, artifacts = await counts(cluster, sent)
    assert (blobs, artifacts) == (1, 1)
    assert base64.b64encode(sent.data) in sent.agent.requests[-1].raw
    cluster.keep(sent.worker)


async def counts(cluster: Cluster, sent: Sent) -> tuple[int, int, int]:
    """Contents, chunks and artifacts of the file in the database, once nothing waits there any more."""
    await until(lambda: gone(cluster), "the killed process's transaction is over")
    row = await cluster.sql.fetchrow(
        """select (select count(*) from artifact_blobs where digest = $1),
                  (select count(*) from artifact_chunks where digest = $1),
                  (select count(*) from artifacts where digest = $1)""",
        sent.digest,
    )
    assert row is not None
    return tuple(row)


async def swept(cluster: Cluster) -> int:
    """Run the sweep as if the hour were over."""
    pool = ApiPool(ConnectSettings(dsn=cluster.dsn))
    await pool.start()
    try:
        return await Blobs().sweep(pool, 0)
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def locked(cluster: Cluster, statement: str) -> AsyncIterator[None]:
    """Hold a lock for the length of the block."""
    connection = await asyncpg.connect(cluster.dsn)
    try:
        async with connection.transaction():
            await connection.execute(statement)
            yield
    finally:
        await connection.close()


async def waits(cluster: Cluster) -> bool:
    """Whether an API connection waits for a lock."""
    return bool(
        await cluster.sql.fetchval(
            """select exists (select from pg_stat_activity where datname = current_database()
               and application_name = 'omnara:api' and wait_event_type = 'Lock')"""
        )
    )


async def gone(cluster: Cluster) -> bool:
    """Whether no API connection waits or is in a transaction any more."""
    return not await cluster.sql.fetchval(
        """select exists (select from pg_stat_activity where datname = current_database()
           and application_name = 'omnara:api' and (wait_event_type = 'Lock' or xact_start is not null))"""
    )
