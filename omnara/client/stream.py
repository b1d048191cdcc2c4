"""Reading an agent's events for as long as it takes: over disconnects, restarts and other replicas.

Every durable event is delivered once and in order, whatever happens to the connection: the reader resumes with
Last-Event-ID, drops what it has seen, and takes silence for a broken connection. Source: api.md §11, §15.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from omnara.client.errors import ApiError, ServerUnreachable, StreamBroken, is_retryable_status
from omnara.client.sse import Frame, FrameParser
from omnara.client.transport import CONNECT_TIMEOUT_S, Transport, api_error
from omnara.client.types import Delta, Event, ToolCallUpdate
from omnara.clock import Backoff

__all__ = ["ConnectionChange", "EventStream", "StreamItem"]

StreamItem = Event | Delta | ToolCallUpdate

ConnectionChange = Callable[[str | None], None]
"""Told why the connection was lost, and None when there is one (again). Called in the reader's task; it must not block
or raise."""

SILENCE_S: Final = 35.0
"""More than two heartbeats of 15 s: the connection is dead, whatever TCP says."""
BACKOFF_S: Final = (0.2, 30.0)
_DURABLE: Final = frozenset({"agent_input", "model_output", "tool_result", "context_checkpoint"})


class _Lost(Exception):
    """The connection ended in a way after which another one may work."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class _Closed(_Lost):
    """The server has ended the stream, and said nothing: it shuts down, is out of patience, or nothing will follow."""


class EventStream:
    """An async iterator over an agent's events after sequence `after`, then everything that follows.

    It ends when the agent is archived: nothing will ever follow then. Use it as
    `async with client.stream(agent) as events: async for event in events: …`. Raises ApiError for a refusal that a
    repetition cannot cure, StreamBroken when the server reports an internal error or leaves a gap. Cancellation, or
    leaving the block, closes the connection at once.
    """

    def __init__(
        self,
        transport: Transport,
        find_path: Callable[[], Awaitable[str]],
        is_over: Callable[[], Awaitable[bool]],
        *,
        after: int,
        deltas: bool,
        silence_s: float = SILENCE_S,
        backoff_s: tuple[float, float] = BACKOFF_S,
        on_connection: ConnectionChange | None = None,
    ) -> None:
        self._transport = transport
        self._find_path = find_path
        self._is_over = is_over
        self._last = after
        self._deltas = deltas
        self._silence_s = silence_s
        self._backoff = Backoff(*backoff_s)
        self._on_connection = on_connection
        self._reconnects = 0
        self._gap_at: int | None = None
        self._items = self._run()

    @property
    def last_sequence(self) -> int:
        """Sequence of the last durable event that was delivered; where another reader would go on."""
        return self._last

    @property
    def reconnects(self) -> int:
        """How often the connection had to be made again."""
        return self._reconnects

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        return await anext(self._items)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._items.aclose()

    async def _run(self) -> AsyncGenerator[StreamItem, None]:
        while True:
            try:
                # Closed by name: leaving the block must close the connection now, not when garbage is collected.
                async with contextlib.aclosing(self._frames()) as frames:
                    async for frame in frames:
                        item = self._item(frame)
                        if item is not None:
                            self._backoff.reset()
                            yield item
            except _Lost as lost:
                if isinstance(lost, _Closed) and await self._has_ended():
                    return
                self._reconnects += 1
                self._tell(str(lost))
                await asyncio.sleep(max(self._backoff.next_s(), lost.retry_after_s))

    async def _frames(self) -> AsyncGenerator[Frame, None]:
        """Yield the frames of one connection. Ends only with an exception."""
        headers = self._transport.headers | {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        headers["Last-Event-ID"] = str(self._last)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._silence_s)
        params = {"stream_deltas": "true"} if self._deltas else None
        parser = FrameParser()
        path = await self._find_path()
        try:
            async with self._transport.session.get(
                self._transport.url(path), headers=headers, params=params, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _refusal(api_error(response.status, await response.read(), response.headers))
                self._tell(None)
                async for chunk in response.content.iter_any():
                    for frame in parser.feed(chunk):
                        yield frame
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise _Lost(str(error) or type(error).__name__) from error
        raise _Closed("the server closed the stream")

    async def _has_ended(self) -> bool:
        try:
            return await self._is_over()
        except (ApiError, ServerUnreachable):  # what is final, the next connection says too
            return False

    def _tell(self, lost: str | None) -> None:
        if self._on_connection is not None:
            self._on_connection(lost)

    def _item(self, frame: Frame) -> StreamItem | None:
        try:
            return self._decoded(frame)
        except msgspec.ValidationError as error:
            raise StreamBroken(f"a frame of kind {frame.event!r} does not fit: {error}") from error
        except msgspec.DecodeError as error:
            raise _Lost(f"a frame is damaged: {error}") from error

    def _decoded(self, frame: Frame) -> StreamItem | None:
        if frame.event in _DURABLE:
            return self._durable(msgspec.json.decode(frame.data, type=Event))
        if frame.event == "model_output_delta":
            return msgspec.json.decode(frame.data, type=Delta)
        if frame.event == "tool_call_update":
            return msgspec.json.decode(frame.data, type=ToolCallUpdate)
        if frame.event == "error":
            problem = msgspec.json.decode(frame.data, type=dict[str, str])
            if problem.get("code") != "service_unavailable":
                raise StreamBroken(f"{problem.get('code')}: {problem.get('error')}")
            raise _Lost("service_unavailable")
        return None

    def _durable(self, event: Event) -> Event | None:
        if event.sequence <= self._last:
            return None
        if event.sequence > self._last + 1:
            # One reconnection gives the server the chance to read its log again; a gap that stays is its fault.
            if self._gap_at == self._last:
                raise StreamBroken(f"the log has a gap after {self._last}")
            self._gap_at = self._last
            raise _Lost(f"event {event.sequence} came after {self._last}")
        self._last = event.sequence
        return event


def _refusal(error: ApiError) -> Exception:
    if is_retryable_status(error.status):
        return _Lost(str(error), error.retry_after_s or 0.0)
    return error
