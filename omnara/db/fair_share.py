"""Nobody takes all of the API's connections: who works for one agent, or in the background, waits for a turn first.

All writes to an agent wait for one row. Two hundred of them would hold every connection of the pool just to wait, and
each request for another agent would stand behind them. So at most some of the connections are lent for one agent at a
time; its other requests queue up here, where they cost nothing. In the same way what workers and machines ask leaves
one connection to requests: fifty agents that run commands would otherwise hold all of them. Source: coordination §11.5;
field-reports B52.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final
from uuid import UUID

__all__ = ["FairShare", "agent_in_work", "in_background", "is_background", "work_for"]

_AGENT: Final[ContextVar[UUID | None]] = ContextVar("agent_in_work", default=None)
_BACKGROUND: Final[ContextVar[bool]] = ContextVar("in_background", default=False)


@contextmanager
def work_for(agent_id: UUID | None) -> Iterator[None]:
    """Whatever this task asks of the database in the block, it asks for this agent; None: for nobody in particular."""
    token = _AGENT.set(agent_id)
    try:
        yield
    finally:
        _AGENT.reset(token)


def agent_in_work() -> UUID | None:
    """The agent that this task works for."""
    return _AGENT.get()


@contextmanager
def in_background() -> Iterator[None]:
    """Whatever this task, or one that it starts in the block, asks of the database leaves a connection to requests."""
    token = _BACKGROUND.set(True)
    try:
        yield
    finally:
        _BACKGROUND.reset(token)


def is_background() -> bool:
    """Whether this task works in the background."""
    return _BACKGROUND.get()


class _Share:
    __slots__ = ("turns", "users")

    def __init__(self, limit: int) -> None:
        self.turns = asyncio.Semaphore(limit)
        self.users = 0


class FairShare:
    """Who may ask for a connection. For one event loop; first come, first served within an agent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shares: dict[UUID, _Share] = {}

    def __len__(self) -> int:
        return len(self._shares)

    @asynccontextmanager
    async def turn(self, agent_id: UUID, timeout_s: float) -> AsyncIterator[None]:
        """Wait for a turn of this agent and hold it. Raises TimeoutError. Safe to cancel."""
        share = self._shares.get(agent_id)
        if share is None:
            share = self._shares[agent_id] = _Share(self._limit)
        share.users += 1
        try:
            if share.turns.locked():
                async with asyncio.timeout(timeout_s):
                    await share.turns.acquire()
            else:
                await share.turns.acquire()  # at once
            try:
                yield
            finally:
                share.turns.release()
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[agent_id]
