"""An endpoint that sends given bytes, for what no well-behaved model server would send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web


class Canned:
    """What to send next, and what came."""

    def __init__(self) -> None:
        self.url = ""
        self.pieces: list[bytes] = []
        self.headers = {"content-type": "text/event-stream"}
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.connections: set[object] = set()
        self.turns_before_end = 0
        """Turns of the event loop between the last piece and the end of the body."""
        self.script: Callable[[bytes], AsyncIterator[bytes]] | None = None
        """Makes the pieces from the body of a request, in place of `pieces`."""

    def say(self, *events: object) -> None:
        """Send these values as the data of events; bytes and text go out as they are."""
        self.pieces = [b"data: " + _data(event) + b"\n\n" for event in events]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Record a request and send the pieces."""
        lowered = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((lowered, await request.read()))
        self.connections.add(request.transport)
        response = web.StreamResponse(headers=self.headers)
        await response.prepare(request)
        if self.script is not None:
            async for piece in self.script(self.requests[-1][1]):
                await response.write(piece)
        else:
            for piece in self.pieces:
                await response.write(piece)
        for _ in range(self.turns_before_end):
            await asyncio.sleep(0)
        await response.write_eof()
        return response


def _data(event: object) -> bytes:
    if isinstance(event, bytes):
        return event
    return event.encode() if isinstance(event, str) else msgspec.json.encode(event)


def chunks(*deltas: Mapping[str, object], finish: str | None = "stop", usage: object = None) -> Iterable[object]:
    """Chat Completions chunks with these deltas, then the reason to stop, usage if any, and the end marker."""
    for delta in deltas:
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    if finish is not None:
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    if usage is not None:
        yield {"choices": [], "usage": usage}
    yield "[DONE]"


@asynccontextmanager
async def canned() -> AsyncIterator[Canned]:
    """Serve on a port of the system's choice."""
    endpoint = Canned()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", endpoint.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()
