"""Measures how late the event loop runs: a loop that something blocks must not go on claiming agents.

Source: coordination §11.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from omnara.clock import monotonic

INTERVAL_S: Final = 0.25


async def watch_loop(ran: Callable[[float], None]) -> None:
    """Call `ran` with the lag in seconds four times a second, until cancelled."""
    while True:
        before = monotonic()
        await asyncio.sleep(INTERVAL_S)
        ran(max(0.0, monotonic() - before - INTERVAL_S))
