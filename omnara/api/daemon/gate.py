"""How much machines may ask for at once: a daemon gone mad, or one of whom nobody knows, costs the others little.

Each request of a machine means a query for its token, and mostly a transaction that waits for the machine's row. Some
hundreds of them would hold every connection of the pool just to wait, and what people ask would stand behind. So a
token may ask for a few things at once and is served one by one, all machines together have the turns that their
channels have, and tokens that were not seen to be good here are looked up one at a time. Whatever is beyond a bound is
503 with `Retry-After` before it costs a query: no daemon destroys anything for that, it comes again.
Source: machines.md §2 (how the daemon reacts), §3 (displacement); DESIGN §2 (bounded queues).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final
from uuid import UUID

from omnara.errors import Unauthorized, Unavailable
from omnara.metrics import Metrics

__all__ = ["Gate", "Visit"]

AT_ONCE: Final = 4
"""Requests of one token. A daemon makes one at a time; one of before may still be on its way, or a second daemon."""
SOCKETS: Final = 4
"""Sockets of one machine: the one that counts, and some that it has displaced and that are being closed."""
WAITING: Final = 256
"""Requests that may wait for their turn. After a restart, every daemon of a replica comes back within a second."""
PATIENCE_S: Final = 2.0
"""As long as a row lock is waited for: whoever waits longer stands behind something that is stuck."""
RETRY_S: Final = 2.0
REMEMBERED: Final = 10_000
"""Tokens seen to be good: as many as an organization may have machines. One that is forgotten is looked up in line."""


class Visit:
    """One request that was let in. `leave` ends its being counted; a socket calls it once it is open."""

    def __init__(self, gate: Gate, key: str, own: asyncio.Semaphore) -> None:
        self._gate = gate
        self._key: str | None = key
        self._own = own

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one of the turns in which machines use the database, and hold it. Raises Unavailable.

        One at a time for a token: what two of its requests want would wait for the same row.
        """
        async with self._gate.turn(self._own):
            yield

    def leave(self) -> None:
        """Make room for another request of this token. May be called again."""
        key, self._key = self._key, None
        if key is not None:
            self._gate.left(key)


class _Inside:
    __slots__ = ("count", "turn")

    def __init__(self) -> None:
        self.count = 0
        self.turn = asyncio.Semaphore(1)


class Gate:
    """One per process, for one event loop. `turns` are those of the channels: all that machines ask is in one line."""

    def __init__(self, turns: asyncio.Semaphore, metrics: Metrics) -> None:
        self._turns = turns
        self._refused = metrics.machine_requests_refused
        self._strangers = asyncio.Semaphore(1)
        self._waiting = 0
        self._inside: dict[str, _Inside] = {}
        self._sockets = Counter[UUID]()
        self._good: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def visit(self, key: str) -> Iterator[Visit]:
        """Let a request in; `key` stands for its token. Raises Unavailable when the token asks for too much at once."""
        inside = self._inside.get(key)
        if inside is None:
            inside = self._inside[key] = _Inside()
        if inside.count >= AT_ONCE:
            raise self._refusal("token", "too many requests with this token at once")
        inside.count += 1
        visit = Visit(self, key, inside.turn)
        try:
            yield visit
        finally:
            visit.leave()

    @asynccontextmanager
    async def lookup(self, key: str) -> AsyncIterator[None]:
        """Hold a turn in which a token is looked up. When the block ends well, the token is a good one.

        A flood of tokens that nobody ever issued is in a line of its own: of that, one look at a time. Raises
        Unavailable.
        """
        async with AsyncExitStack() as stack:
            if key not in self._good:
                await stack.enter_async_context(self._wait(self._strangers))
            await stack.enter_async_context(self._wait(self._turns))
            try:
                yield
            except Unauthorized:
                self._good.pop(key, None)
                raise
        self._good[key] = None
        self._good.move_to_end(key)
        while len(self._good) > REMEMBERED:
            self._good.popitem(last=False)

    @asynccontextmanager
    async def turn(self, own: asyncio.Semaphore) -> AsyncIterator[None]:
        """See `Visit`; `own` is the token's."""
        async with self._wait(own), self._wait(self._turns):
            yield

    @contextmanager
    def socket(self, machine_id: UUID) -> Iterator[None]:
        """Count a socket of a machine while the block runs. Raises Unavailable when it has too many."""
        if self._sockets[machine_id] >= SOCKETS:
            raise self._refusal("socket", "too many sockets of this machine at once")
        self._sockets[machine_id] += 1
        try:
            yield
        finally:
            self._sockets[machine_id] -= 1
            if not self._sockets[machine_id]:
                del self._sockets[machine_id]

    def left(self, key: str) -> None:
        """Count one request less of a token."""
        inside = self._inside[key]
        inside.count -= 1
        if not inside.count:
            del self._inside[key]

    @asynccontextmanager
    async def _wait(self, line: asyncio.Semaphore) -> AsyncIterator[None]:
        if line.locked():
            if self._waiting >= WAITING:
                raise self._refusal("line", "too many machines at once")
            self._waiting += 1
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await line.acquire()
            except TimeoutError:
                raise self._refusal("line", "too many machines at once") from None
            finally:
                self._waiting -= 1
        else:
            await line.acquire()  # at once
        try:
            yield
        finally:
            line.release()

    def _refusal(self, bound: str, why: str) -> Unavailable:
        self._refused.labels(bound).inc()
        return Unavailable(f"{why}; try again soon", retry_after_s=RETRY_S)
