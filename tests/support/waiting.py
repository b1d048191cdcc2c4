"""Waiting for something to become true, with a deadline and without guessing how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], bool | Awaitable[bool]], what: str, *, limit_s: float = 20.0) -> float:
    """Ask again and again until `true()` holds; return how many seconds that took. Fails the test after `limit_s`."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.timeout(limit_s + 5):
        while True:
            answer = true()
            if answer if isinstance(answer, bool) else await answer:
                return loop.time() - started
            assert loop.time() - started < limit_s, f"not within {limit_s:g} s: {what}"
            await asyncio.sleep(0.005)
