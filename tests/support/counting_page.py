"""A web server that stands for the outside world: whatever is fetched there has happened, and is counted."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import web

from tests.support.waiting import until


class CountingPage:
    """A web server whose every path is a page; counts the visits of each and holds those that a test wants held."""

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self._held: dict[str, asyncio.Event] = {}
        self._visited = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> CountingPage:
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for event in self._held.values():
            event.set()
        assert self._runner is not None
        await self._runner.cleanup()

    def hold(self, name: str) -> None:
        """Let visitors of this page wait until `release`."""
        self._held[name] = asyncio.Event()

    def release(self, name: str) -> None:
        """Answer those who wait, and all later ones at once."""
        self._held[name].set()

    def reset(self) -> None:
        """Forget all visits, and answer those who still wait: the next test may use the same names."""
        for event in self._held.values():
            event.set()
        self._held.clear()
        self.hits.clear()

    async def visited(self, name: str, *, within_s: float = 30.0) -> None:
        """Wait for the first visit."""
        await until(lambda: self.hits[name] > 0, f"{name} is fetched", limit_s=within_s)

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.hits[name] += 1
        if (held := self._held.get(name)) is not None:
            await held.wait()
        if name.endswith(".html"):
            text = f"<html><body><main><p>{('The page called ' + name + ' says so. ') * 20}</p></main></body></html>"
            return web.Response(text=text, content_type="text/html")
        return web.Response(text=f"page {name}")
