"""A machine that may be suspended: waiting, without a connection, until somebody knocks or time has jumped.

Whoever wakes the machine connects to one port; and a clock that jumped says that it was suspended and is awake again.
Source: machines.md §9.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from omnara.log import get_logger

__all__ = ["WAKE_PORT", "until_woken"]

log = get_logger(__name__)

WAKE_PORT: Final = 8377
JUMP_S: Final = 5.0
_TICK_S: Final = 1.0
_ANSWER: Final = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"


async def until_woken(port: int = WAKE_PORT, host: str | None = None) -> str:
    """Wait until a connection comes in on `port` or the wall clock jumps ahead by 5 s; return which it was.

    A port that is taken by somebody else is no reason not to sleep: the clock remains.
    """
    knocked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocked.set()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                await reader.read(4096)
                writer.write(_ANSWER)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        log.warning("nobody can knock to wake this machine", port=port, error=str(error))
        await _until_jump()
        return "clock"
    async with server:
        jump = asyncio.ensure_future(_until_jump())
        knock = asyncio.ensure_future(knocked.wait())
        try:
            await asyncio.wait((jump, knock), return_when=asyncio.FIRST_COMPLETED)
            return "knock" if knock.done() else "clock"
        finally:
            for one in (jump, knock):
                one.cancel()
            await asyncio.gather(jump, knock, return_exceptions=True)


async def _until_jump() -> None:
    """Return when the wall clock got ahead of the sleeps: the computer stood still in between."""
    before = time.time()
    while True:
        await asyncio.sleep(_TICK_S)
        now = time.time()
        if now - before >= JUMP_S + _TICK_S:
            return
        before = now
