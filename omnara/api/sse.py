"""One open event stream: subscribe, replay the log after the client's place, then go on live.

The order is what makes it whole: the subscription exists before the first page is read, every event is sent only if it
is the next one, and whatever is missing is read from the log. Previews ride along and may be lost.
Source: DESIGN §6; api.md §11; coordination §8 (an id above the head); field-reports B31, B32, B35.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Final, assert_never
from uuid import UUID

from aiohttp import hdrs, web

from omnara.api import frames
from omnara.api.connection import Connection
from omnara.api.event_json import Owner, live_event, stored_event
from omnara.api.half_open import expect_acknowledgement
from omnara.api.middleware import EVENT_STREAM, REQUEST_ID, REQUEST_ID_HEADER
from omnara.api.streams import AgentStream, SharedPage, StreamHub
from omnara.clock import monotonic
from omnara.db.reads import EventRow
from omnara.db.streams import Reading
from omnara.domain.events import ModelOutputPayload
from omnara.engine.feed_items import Batch, CallState, Delta, Durable, Item, Subscription
from omnara.errors import InvalidRequest, NotFound, Unavailable

STALL_S: Final = 20.0
"""A client that has taken nothing for so long is cut; it resumes from the log. Source: field-reports B31."""
HEADERS: Final = {
    "Content-Type": EVENT_STREAM,
    "Cache-Control": "no-cache, no-transform",
    "Connection": "keep-alive",
    "X-Accel-Buffering": "no",
}
PIECE_BYTES: Final = 256 * 1024
CRASHED: Final = frames.error("internal_error", "the agent has crashed; resume it, then open the stream again")
CUT: Final = frames.error("internal_error", "the database has lost the end of this log; read it again from the start")
SHUTTING_DOWN: Final = frames.error("service_unavailable", "this server is shutting down; reconnect")
_REMEMBERED_CALLS: Final = 16
_CALL_ID: Final = '{"model_call_context_id":"'


class Previews:
    """Which deltas this connection may still show, and how they are numbered.

    A run that merges n deltas takes one number, so the numbers that a client sees have gaps only where deltas were
    lost; a client that joins in mid-call starts above 1 and knows that it missed the beginning.
    """

    def __init__(self) -> None:
        self._over: deque[str] = deque(maxlen=_REMEMBERED_CALLS)
        self._call_id = ""
        self._merged = 0

    def output_sent(self, call_id: str) -> None:
        """Note that the durable output of a call was sent: later deltas of it are stale."""
        self._over.append(call_id)

    def frame(self, delta: Delta) -> bytes:
        """Return the frame of a run, or nothing when its output was sent before."""
        if delta.call_id in self._over:
            return b""
        if delta.call_id != self._call_id:
            self._call_id, self._merged = delta.call_id, 0
        seq = delta.first - self._merged
        self._merged += delta.count - 1
        if seq != delta.first:
            return frames.model_delta(delta, seq)
        if delta.frame is None:
            delta.frame = frames.model_delta(delta, seq)
        return delta.frame


class StreamWriter:
    """Sends one agent's stream over one response. Used by one task."""

    def __init__(
        self, hub: StreamHub, stream: AgentStream, owner: Owner, request: web.Request, response: web.StreamResponse
    ) -> None:
        self._hub = hub
        self._stream = stream
        self._owner = owner
        self._response = response
        self._previews = Previews()
        self._last_words = b""
        self._transport = request.transport
        self._failure: Exception | None = None

    async def run(self, first: SharedPage) -> None:
        """Replay from `first` on, then live, until the stream ends or the client is gone.

        Returns when the stream was ended by the server; raises ConnectionError or TimeoutError when the client left.
        """
        await self._write(frames.OPENED)
        over = await self._catch_up(first)
        subscription = self._stream.subscription
        if self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked":
            subscription.attach(partial(self._hub.flusher.add, self._flush))
        try:
            await self._live(subscription, over)
        finally:
            subscription.attach(None)
        await self._finish()

    async def _live(self, subscription: Subscription, over: bool) -> None:
        while not over:
            await subscription.wait()
            if self._failure is not None:
                raise self._failure
            batch = subscription.take()
            if batch.closed:
                break
            over = await self._forward(batch)

    def _flush(self, now: float) -> None:
        """Write what has arrived in place of the task, if that waits and the client has taken everything so far.

        What cannot be done at once is the task's: it is woken instead.
        """
        subscription, transport = self._stream.subscription, self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() or not subscription.idle:
            subscription.tick()
            return
        try:
            data = self._frames(subscription.take_items())
        except Exception as error:  # noqa: BLE001 - raised by the task: the other streams of this turn have no part in it
            self._failure = error
            subscription.tick()
            return
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            self._stream.written_at = now

    def _frames(self, items: list[Item]) -> bytes:
        if len(items) == 1:
            return self._frame(items[0])
        return b"".join([self._frame(item) for item in items])

    async def _forward(self, batch: Batch) -> bool:
        """Send a batch; return True when the agent's log is at its end for good."""
        if batch.behind and await self._look():
            return True
        data = self._frames(batch.items)
        if data:
            await self._write(data)
        elif monotonic() - self._stream.written_at >= self._hub.heartbeat_s * 0.7:
            await self._write(frames.HEARTBEAT)
        return False

    def _frame(self, item: Item) -> bytes:
        match item:
            case Delta():
                return self._previews.frame(item)
            case Durable():
                return self._durable(item)
            case CallState():
                if item.frame is None:
                    item.frame = frames.call_update(item.call_id, item.state)
                return item.frame
            case _:
                assert_never(item)

    def _durable(self, item: Durable) -> bytes:
        event = item.event
        place = self._stream.place
        if event.sequence != place.seen + 1:
            if event.sequence > place.seen:
                self._stream.subscription.wake()
            return b""
        place.reached(event.sequence, event.id)
        if isinstance(event.payload, ModelOutputPayload):
            self._previews.output_sent(event.payload.model_call_context_id)
        if item.frame is None:
            item.frame = frames.durable(event.sequence, event.kind, live_event(self._owner, event))
        return item.frame

    async def _look(self) -> bool:
        """Read and send what the log has; return True when it is at its end for good.

        While the database is away the stream stays open and looks again at the next tick.
        """
        try:
            page = await self._hub.page(self._stream.subscription.agent_id, self._stream.place.seen)
        except Unavailable:
            self._stream.retry = True
            return False
        return page is None or await self._catch_up(page)

    async def _catch_up(self, shared: SharedPage) -> bool:
        """Send pages until the head, starting with `page`; return True when all was sent and nothing will follow: the
        agent is archived, or crashed, which only a person ends.

        Also when the log ends before what was sent, or has something else there: a failover lost the rest, and what
        takes its place would seem to follow it. Source: coordination §8.
        """
        stream, place = self._stream, self._stream.place
        while True:
            page = shared.log
            if place.is_lost(page.head, page.last_id):
                self._last_words = CUT
                return True
            if page.events:
                for row in page.events:
                    place.reached(row.sequence, row.id)
                stream.subscription.reached(place.seen)
                await self._write_page(shared)
            if place.seen >= page.head:
                if page.gate == "crashed":
                    self._last_words = CRASHED
                return page.gate in {"archived", "crashed"}
            try:
                following = await self._hub.page(stream.subscription.agent_id, place.seen)
            except Unavailable:
                stream.retry = True
                return False
            if following is None or not following.log.events:
                return following is None
            shared = following

    async def _write_page(self, page: SharedPage) -> None:
        """Send the events of a page in pieces, so that a client that stalls holds one piece in its socket's buffer."""
        parts: list[bytes] = []
        size = 0
        if page.frames is None:
            page.frames = [self._stored(row) for row in page.log.events]
        for row, frame in zip(page.log.events, page.frames, strict=True):
            self._note_output(row)
            parts.append(frame)
            size += len(frame)
            if size >= PIECE_BYTES:
                await self._write(b"".join(parts))
                parts, size = [], 0
        if parts:
            await self._write(b"".join(parts))

    def _stored(self, row: EventRow) -> bytes:
        kind, event = stored_event(self._owner, row)
        return frames.durable(row.sequence, kind, event)

    def _note_output(self, row: EventRow) -> None:
        if row.payload.startswith(_CALL_ID):
            start = len(_CALL_ID)
            self._previews.output_sent(row.payload[start : row.payload.index('"', start)])

    async def _finish(self) -> None:
        if self._last_words:
            await self._write(self._last_words)
        elif self._stream.ending == "shutdown":
            await self._write(SHUTTING_DOWN)
        elif self._stream.ending == "lost":
            await self._write(CUT)

    async def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.get_write_buffer_size():
            # Nothing waits in front of these bytes, so they go out without waiting; the usual case by far.
            await self._response.write(data)
        else:
            async with asyncio.timeout(STALL_S):
                await self._response.write(data)
        self._stream.written_at = monotonic()


async def serve(
    request: web.Request, hub: StreamHub, owner: Owner, *, agent_id: UUID, reading: Reading, after: int, deltas: bool
) -> web.StreamResponse:
    """Answer a request with an agent's stream from `after` on, and return when it is over.

    The caller has checked that the agent may be read. Raises NotFound, InvalidRequest for a place beyond the head of
    the log (the client's copy is from before a restore: it has to start again) and Unavailable, all before the
    response begins; afterwards nothing but cancellation.
    """
    with hub.open(agent_id, reading=reading, deltas=deltas, after=after) as stream:
        first = await hub.page(agent_id, after)
        if first is None:
            raise NotFound
        if after > first.log.head:
            raise InvalidRequest("the log ends before that event; read it again from the start")
        if first.log.last_id is not None:
            stream.place.reached(after, first.log.last_id)
        response = web.StreamResponse(headers={**HEADERS, REQUEST_ID_HEADER: REQUEST_ID.get()})
        with Connection.watch(request, stream.subscription.close):
            try:
                expect_acknowledgement(request.transport, hub.heartbeat_s)
                await response.prepare(request)
                await StreamWriter(hub, stream, owner, request, response).run(first)
                await response.write_eof()
            except (ConnectionError, TimeoutError):
                # The client is gone or does not read. What it missed is in the log.
                response.force_close()
                if request.transport is not None:
                    request.transport.abort()
    return response
