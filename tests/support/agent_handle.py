"""One agent of a cluster test, from outside: its rows, its log over HTTP, what the model was asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import asyncpg

from omnara.client import Client, Event
from omnara.ids import IdKind, decode
from omnara.testing import Entry, Gate, ModelServer
from tests.support.times import Times
from tests.support.waiting import until


class Surroundings(Protocol):
    """What an agent's handle needs of its cluster."""

    dsn: str
    sql: asyncpg.Pool
    model: ModelServer
    times: Times


class Handle:
    """One agent of a test: its ids, what it was told, and what the outside knows of it."""

    def __init__(self, cluster: Surroundings, client: Client, public_id: str, key: str, gate: Gate | None) -> None:
        self.cluster = cluster
        self.client = client
        self.id = public_id
        self.uuid = decode(IdKind.AGENT, public_id)
        self.key = key
        self._gate = gate

    @property
    def gate(self) -> Gate:
        """The gate that it was launched with."""
        assert self._gate is not None, "launched without a gate"
        return self._gate

    @property
    def requests(self) -> list[Entry]:
        """What the model server was asked for this agent."""
        return self.cluster.model.log.of(self.key)

    async def asked(self, times: int, *, within_s: float = 30.0) -> None:
        """Wait until the model was asked so often for this agent."""
        await until(lambda: len(self.requests) >= times, f"request {times} of {self.key[:12]}", limit_s=within_s)

    async def hot(self) -> asyncpg.Record:
        """Its hot row."""
        row = await self.cluster.sql.fetchrow("select * from agent_sched where agent_id = $1", self.uuid)
        assert row is not None
        return row

    async def steps(self) -> list[asyncpg.Record]:
        """Its steps in order."""
        return list(await self.cluster.sql.fetch("select * from steps where agent_id = $1 order by number", self.uuid))

    async def step_states(self) -> list[tuple[str, str]]:
        """Kind and state of each step, in order."""
        return [(row["kind"], row["state"]) for row in await self.steps()]

    async def events(self) -> list[Event]:
        """Its log, read over HTTP."""
        return [event async for event in self.client.events(self.id)]

    async def texts(self, kind: str = "model_output") -> list[str]:
        """The texts of its events of one kind."""
        return [event.text for event in await self.events() if event.kind == kind]

    async def settled(self, status: str = "idle", *, within_s: float | None = None) -> None:
        """Wait until it has this status."""
        limit_s = self.cluster.times.patience_s if within_s is None else within_s

        async def there() -> bool:
            return bool(
                await self.cluster.sql.fetchval(
                    "select status = $2 from agents_overview where agent_id = $1", self.uuid, status
                )
            )

        try:
            await until(there, f"{self.key[:30]} is {status}", limit_s=limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {dict(await self.hot())} {await self.step_states()}") from None

    async def until_step(self, number: int, *, within_s: float | None = None) -> asyncpg.Record:
        """Wait until this step has begun; its row."""
        limit_s = self.cluster.times.patience_s if within_s is None else within_s

        async def there() -> bool:
            return bool(
                await self.cluster.sql.fetchval(
                    "select exists (select from steps where agent_id = $1 and number = $2)", self.uuid, number
                )
            )

        await until(there, f"step {number} begins", limit_s=limit_s)
        return (await self.steps())[number - 1]

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Keep its hot row locked, so that nobody can save, admit or release meanwhile; nothing is changed."""
        connection = await asyncpg.connect(self.cluster.dsn)
        try:
            async with connection.transaction():
                await connection.execute("select 1 from agent_sched where agent_id = $1 for no key update", self.uuid)
                yield
        finally:
            await connection.close()
