"""One open stream over all agents of a project: catch up to the tail's mark, then follow the tail.

The order is what makes it whole: the tail looks after the request came, so its mark is not older than the client's
place; from that moment on its news are queued; then the log is read from the place exactly to the mark.
Source: DESIGN §6.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from omnara.access.roles import ProjectScope
from omnara.api import frames, project_cursor, sse
from omnara.api.connection import Connection
from omnara.api.half_open import expect_acknowledgement
from omnara.api.middleware import REQUEST_ID, REQUEST_ID_HEADER
from omnara.api.project_cursor import Place
from omnara.api.project_tail import ProjectFrame
from omnara.api.project_tails import Following
from omnara.api.streams import OpenStream, StreamHub
from omnara.clock import monotonic
from omnara.db.streams import Reading
from omnara.errors import Unavailable


class ProjectWriter:
    """Sends one project's stream over one response. Used by one task."""

    def __init__(
        self,
        hub: StreamHub,
        stream: OpenStream,
        following: Following,
        place: Place,
        response: web.StreamResponse,
    ) -> None:
        self._hub = hub
        self._stream = stream
        self._reader = following.reader
        self._tail = following.tail
        self._place = place
        self._response = response

    async def run(self) -> None:
        """Send until the server ends the stream. Raises ConnectionError or TimeoutError when the client left."""
        await self._write(frames.OPENED + self._where())
        self._reader.behind = True
        while True:
            await self._reader.wait()
            if self._reader.closed:
                if self._stream.ending == "shutdown":
                    await self._write(sse.SHUTTING_DOWN)
                return
            if self._reader.behind:
                await self._catch_up()
            elif waiting := self._reader.take():
                await self._send(waiting)
            # Also after a look that failed: a stream is as alive as ever while the database is away.
            if monotonic() - self._stream.written_at >= self._hub.heartbeat_s * 0.7:
                await self._write(frames.HEARTBEAT)

    def _where(self) -> bytes:
        """The client's place, so that it has one before the first event."""
        if self._place.since is None:
            return b""
        return frames.place_only(project_cursor.encode(self._tail.project_id, self._tail.database, self._place))

    async def _catch_up(self) -> None:
        """Read the log up to the tail's mark, and queue what follows. While the database is away, wait for a tick."""
        try:
            await self._tail.look()
            mark = self._tail.mark
            self._reader.begin()
            halfway = self._place.until
            if halfway is not None and halfway.timeline != mark.timeline:
                # Nobody can say any more what belonged to a batch that a failover cut short: it is sent again.
                self._place = Place(self._place.since)
            elif halfway is not None:
                async for page in self._tail.missed(self._place, halfway):
                    await self._send(page)
                self._place = Place(halfway)
            async for page in self._tail.missed(self._place, mark):
                await self._send(page)
            self._place = Place(mark)
        except Unavailable:
            self._reader.rest()
            self._stream.retry = True

    async def _send(self, waiting: list[ProjectFrame]) -> None:
        """Send frames in pieces, and know the place after each: a client that stalls holds one piece."""
        parts: list[bytes] = []
        size = 0
        for frame in waiting:
            parts.append(frame.data)
            size += len(frame.data)
            if size >= sse.PIECE_BYTES:
                await self._write(b"".join(parts))
                self._place = frame.place
                parts, size = [], 0
        if parts:
            await self._write(b"".join(parts))
        self._place = waiting[-1].place

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(sse.STALL_S):
            await self._response.write(data)
        self._stream.written_at = monotonic()


async def serve(
    request: web.Request,
    hub: StreamHub,
    project: ProjectScope,
    *,
    reading: Reading,
    after: str | None,
    from_start: bool,
) -> web.StreamResponse:
    """Answer a request with the stream of a project, after a place or from now or from the start, until it is over.

    The caller has checked that the project's agents may be listed. Raises InvalidRequest for what is no place here, and
    Unavailable, both before the response begins; afterwards nothing but cancellation.
    """
    async with hub.open_project(project, reading=reading) as (stream, following):
        if after is not None:
            place = project_cursor.decode(project.project_id, following.here, after)
        else:
            place = Place(None if from_start else following.here.mark)
        response = web.StreamResponse(headers={**sse.HEADERS, REQUEST_ID_HEADER: REQUEST_ID.get()})
        with Connection.watch(request, following.reader.close):
            try:
                expect_acknowledgement(request.transport, hub.heartbeat_s)
                await response.prepare(request)
                await ProjectWriter(hub, stream, following, place, response).run()
                await response.write_eof()
            except (ConnectionError, TimeoutError):
                # The client is gone or does not read. It comes back with the id of the last frame that it has.
                response.force_close()
                if request.transport is not None:
                    request.transport.abort()
    return response
