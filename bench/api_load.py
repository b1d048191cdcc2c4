"""Requests to a server that is busy: bursts of reads, crowds of new connections, and messages that must not be lost.

Open loop: a burst is due when it is due, whether or not the one before was answered. A client that waits for its answer
before it asks again would be slowed down by the server that it measures, and see a better one than the others do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec

from omnara.client import Client
from omnara.client.errors import ApiError
from omnara.ids import new_uuid

__all__ = ["ApiLoad", "Seen"]

BURST_S: Final = 0.25
CROWD_S: Final = 2.0
MESSAGE_S: Final = 0.05
REQUEST_LIMIT_S: Final = 30.0


class Seen(msgspec.Struct):
    """What clients saw. `unavailable`: 503 with Retry-After; `unheard`: closed without an answer, over the limit."""

    read_ms: list[float] = msgspec.field(default_factory=list)
    reads: int = 0
    answered: int = 0
    unavailable: int = 0
    unheard: int = 0
    accepted: list[str] = msgspec.field(default_factory=list)
    wrong: list[str] = msgspec.field(default_factory=list)


class ApiLoad:
    """Reads `paths` of one server, `burst` at once and now and then `crowd` over new connections; talks to `agents`."""

    def __init__(
        self, url: str, key: str, agents: Sequence[str], paths: Sequence[str], *, burst: int, crowd: int
    ) -> None:
        self._url = url
        self._key = key
        self._agents = agents
        self._paths = itertools.cycle(paths)
        self._burst = burst
        self._crowd = crowd
        self._numbers = itertools.count(1)
        self._name = new_uuid().hex
        """Of this load: the key of an earlier one would be answered with the message that it sent."""
        self.seen = Seen()

    async def run(self, seconds: float) -> Seen:
        """Ask for so long and return once every request is over. Raises what a fault of this bench raises."""
        headers = {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        deadline = time.monotonic() + seconds
        async with (
            aiohttp.ClientSession(
                self._url, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=self._burst)
            ) as kept,
            aiohttp.ClientSession(
                self._url, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
            ) as fresh,
            Client(self._url, self._key, retry_for_s=60.0) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._each(BURST_S, deadline, self._burst, kept, counted=True))
            # The crowds come once the others have their connections: those are within the limit and stay.
            group.create_task(self._each(CROWD_S, deadline, self._crowd, fresh, counted=False, after_s=CROWD_S / 2))
            group.create_task(self._send(client, deadline))
        return self.seen

    async def _each(
        self,
        every_s: float,
        deadline: float,
        count: int,
        session: aiohttp.ClientSession,
        *,
        counted: bool,
        after_s: float = 0.0,
    ) -> None:
        due = time.monotonic() + after_s
        async with asyncio.TaskGroup() as group:
            while due < deadline:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                for _ in range(count):
                    group.create_task(self._read(session, next(self._paths), counted=counted))
                due += every_s

    async def _read(self, session: aiohttp.ClientSession, path: str, *, counted: bool) -> None:
        """One request; `counted` ones are those whose time is measured."""
        seen, begun = self.seen, time.perf_counter()
        seen.reads += 1
        try:
            async with session.get(path) as response:
                await response.read()
        except aiohttp.ClientConnectionError:
            seen.unheard += 1
            if counted:
                seen.wrong.append("a connection that was within the limit was closed without an answer")
            return
        except TimeoutError:
            seen.wrong.append(f"a read had no answer in {REQUEST_LIMIT_S:g} s")
            return
        if response.status == 200:
            seen.answered += 1
            if counted:
                seen.read_ms.append((time.perf_counter() - begun) * 1000)
        elif response.status == 503 and response.headers.get("Retry-After"):
            seen.unavailable += 1
        else:
            seen.wrong.append(f"a read was answered with {response.status}")

    async def _send(self, client: Client, deadline: float) -> None:
        """Send messages one by one; each that is accepted has to be in the log in the end."""
        while time.monotonic() < deadline:
            number = next(self._numbers)
            key = f"{self._name}-{number}"
            try:
                await client.send(self._agents[number % len(self._agents)], f"Message {number}.", key=key)
            except ApiError as error:
                self.seen.wrong.append(f"a message was refused with {error.status}")
            else:
                self.seen.accepted.append(key)
            await asyncio.sleep(MESSAGE_S)
