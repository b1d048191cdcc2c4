"""A web page on loopback that counts its visitors: the outside effect that must happen exactly once."""

from __future__ import annotations

import asyncio
from typing import Final, Self

from aiohttp import web

__all__ = ["Page"]

_HTML: Final = """<!doctype html><html lang="en"><head><title>Notice to mariners</title></head><body><main>
<h1>Notice to mariners</h1><p>The south bar buoy has been moved forty metres to the west. Ships drawing more than
three metres wait outside until half tide. This notice replaces the one of last week, which was wrong.</p>
</main></body></html>"""


class Page:
    """Serves one page and counts requests for it. With `hold_first` the first request waits until `release`."""

    def __init__(self, *, hold_first: bool) -> None:
        self.hits = 0
        self.requested = asyncio.Event()
        self._released = asyncio.Event()
        if not hold_first:
            self._released.set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self._port}/notice"

    @property
    def authority(self) -> str:
        """`host:port`, for the server's list of allowed private hosts."""
        return f"127.0.0.1:{self._port}"

    def release(self) -> None:
        """Answer the request that is held, and all later ones at once."""
        self._released.set()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/notice", self._notice)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.release()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _notice(self, _request: web.Request) -> web.Response:
        self.hits += 1
        self.requested.set()
        await self._released.wait()
        return web.Response(text=_HTML, content_type="text/html")
