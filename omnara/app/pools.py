"""The database connections that other parts share, as the first service to start and the last to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import Histogram

from omnara.clock import Deadline, monotonic
from omnara.db.connection import Connection, ConnectSettings, ConnKind
from omnara.db.dedicated import Dedicated
from omnara.db.pool import ApiPool
from omnara.metrics import Metrics

__all__ = ["Pools"]


class MeasuredPool(ApiPool):
    """The API's pool, with the time that callers wait for a connection as a metric."""

    def __init__(self, database: ConnectSettings, wait_s: Histogram) -> None:
        super().__init__(database)
        self._wait_s = wait_s

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """See `ApiPool.acquire`."""
        begun = monotonic()
        async with super().acquire() as connection:
            self._wait_s.observe(monotonic() - begun)
            yield connection


class Pools:
    """A `Service`. `session` is the claimer's connection, which the hints share: both say little and at once."""

    name = "connections"

    def __init__(self, database: ConnectSettings, metrics: Metrics) -> None:
        self.api = MeasuredPool(database, metrics.pool_wait_s)
        self.session = Dedicated(database, ConnKind.CLAIMER)
        metrics.pool_connections.labels("used").set_function(lambda: self.api.in_use)
        metrics.pool_connections.labels("limit").set_function(lambda: self.api.size)

    async def start(self) -> None:
        """Make the pool; connections open when they are used."""
        await self.api.start()

    async def watch(self) -> None:
        """Broken connections are replaced where they are used: nothing here fails for good."""
        await asyncio.Event().wait()

    async def drain(self, deadline: Deadline) -> None:
        """Everybody still needs them."""

    async def stop(self) -> None:
        """Close the connections."""
        await self.session.close()
        await self.api.close()
