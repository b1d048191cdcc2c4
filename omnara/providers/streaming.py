"""One attempt over HTTP: what every wire format does alike, from the body to the verdict.

A format contributes three things (`Wire`): how a call becomes a body, how events become an answer, and its headers. The
rest, above all how every way of failing is named, is here.
Source: engine.md §5 (signals); DESIGN §5.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import aiohttp

from omnara.descriptors import exhausted
from omnara.domain.stream import ErrorDelta, MessageStop, Sink, Stop, StreamFault
from omnara.providers.errors import from_response, from_stream, request_id, safe_message
from omnara.providers.headers import BadCredential, request_headers
from omnara.providers.http import AddressRefused, Expired, HttpPool, Refusal
from omnara.providers.json_events import BadEvent
from omnara.providers.output import OutputBuilder
from omnara.providers.protocol import Completed, Failed, ModelCall, ModelTarget, Outcome
from omnara.providers.received import CutOff, Received, Share
from omnara.providers.sse import SseParser, StreamTooLarge


class StreamedError(Exception):
    """The provider reported an error inside its stream; `value` is the decoded event."""

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__("the provider reported an error in its stream")


class Assembler(Protocol):
    """Turns the events of one answer into blocks."""

    done: bool

    def event(self, data: bytes) -> bool:
        """Take one event; True if it brought something new. Raises StreamedError or BadEvent."""
        ...

    @property
    def complete(self) -> bool:
        """Whether everything that makes an answer whole has arrived."""
        ...

    def finish(self, request_id: str) -> Outcome:
        """Judge the complete answer. Raises BadEvent."""
        ...


class Wire(Protocol):
    """A wire format. `headers` are those that it asks for, `key_header` is where it looks for a key."""

    headers: Mapping[str, str]
    key_header: str

    def url(self, target: ModelTarget) -> str:
        """Where to send the request."""
        ...

    def body(self, call: ModelCall) -> bytes:
        """Serialize the request. Raises DamagedReplay."""
        ...

    def assembler(self, call: ModelCall, output: OutputBuilder) -> Assembler:
        """A fresh assembler for the answer."""
        ...


class _Receiver:
    """Bytes to events to the assembler."""

    def __init__(self, assembler: Assembler, share: Share) -> None:
        self._parser = SseParser()
        self._share = share
        self._event = assembler.event
        self._assembler = assembler
        self.done = False
        self.request_id = ""

    def begin(self, headers: Mapping[str, str]) -> None:
        self.request_id = request_id(headers)

    def feed(self, chunk: bytes) -> bool:
        fresh = False
        self._share.add(len(chunk))
        for data in self._parser.feed(chunk):
            if self._event(data):
                fresh = True
            if self._assembler.done:
                self.done = True
                break
        return fresh


class HttpAdapter:
    """A model adapter for one wire format."""

    def __init__(self, wire: Wire, pool: HttpPool, received: Received | None = None) -> None:
        """`received`: what the answers of the whole process share."""
        self._wire = wire
        self._pool = pool
        self._received = received or Received()

    async def call(self, call: ModelCall, sink: Sink | None) -> Outcome:
        """See `ModelAdapter.call`."""
        if call.suppress_replay:
            call.history.suppress(call.context.sequence)
        body = self._wire.body(call)
        assembler = self._wire.assembler(call, OutputBuilder(call.new_call_id, sink))
        with self._received.answer() as share:
            outcome = await self._attempt(call, body, assembler, share)
        if sink is not None:
            _announce(outcome, sink)
        return outcome

    async def close(self) -> None:
        """See `ModelAdapter.close`. Nothing is held: the pool belongs to whoever made it."""

    async def _attempt(self, call: ModelCall, body: bytes, assembler: Assembler, share: Share) -> Outcome:
        target, replays = call.target, call.history.replays > 0
        receiver = _Receiver(assembler, share)
        try:
            headers = request_headers(target, self._wire.headers, self._wire.key_header)
            await self._pool.stream(self._wire.url(target), headers, body, target.limits, receiver)
            return _judged(assembler, target, receiver.request_id)
        except Refusal as refusal:
            return from_response(
                refusal.status, refusal.headers, refusal.body, key=target.api_key, replays=replays, now=time.time()
            )
        except StreamedError as error:
            return from_stream(error.value, key=target.api_key, replays=replays, request_id=receiver.request_id)
        except StreamTooLarge as error:
            return _too_large(error, target, receiver.request_id)
        except (BadEvent, CutOff, Expired) as error:
            return _transient(str(error), target, ambiguous=True, request_id=receiver.request_id)
        except (AddressRefused, BadCredential, aiohttp.InvalidURL) as error:
            return _refused(error, target)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _connection_failed(error, target)


def _judged(assembler: Assembler, target: ModelTarget, request_id: str) -> Outcome:
    """What a stream that ended came to. Raises BadEvent."""
    if not assembler.complete:
        text = "the provider's stream ended before its answer did"
        return _transient(text, target, ambiguous=True, request_id=request_id)
    return assembler.finish(request_id)


def _announce(outcome: Outcome, sink: Sink) -> None:
    if isinstance(outcome, Completed):
        sink(MessageStop(Stop(outcome.stop_reason if outcome.stop_reason != "error" else "unknown", outcome.usage)))
    else:
        sink(ErrorDelta(StreamFault(outcome.message)))


def _transient(text: str, target: ModelTarget, *, ambiguous: bool, request_id: str = "") -> Failed:
    return Failed(
        kind="transient",
        message=safe_message(text, target.api_key),
        ambiguous=ambiguous,
        request_id=request_id,
    )


def _too_large(error: StreamTooLarge, target: ModelTarget, request_id: str) -> Failed:
    """Nobody could keep it, and it is paid for: another try would most likely cost the same again."""
    return Failed(
        kind="response_too_large",
        message=safe_message(f"response_too_large: {error}", target.api_key),
        ambiguous=True,
        request_id=request_id,
    )


def _refused(error: Exception, target: ModelTarget) -> Failed:
    """Nothing was sent, and nothing will change by itself."""
    if isinstance(error, AddressRefused):
        return Failed(
            kind="invalid_request",
            message=safe_message(f"the model endpoint's address is not allowed: {error}", target.api_key),
            provider_code="address_blocked",
        )
    if isinstance(error, BadCredential):
        return Failed(kind="auth", message=safe_message(str(error), target.api_key))
    return Failed(kind="invalid_request", message="the model endpoint's URL is not usable")


def _connection_failed(error: Exception, target: ModelTarget) -> Failed:
    """Before the connection stood nothing can have happened at the provider; after it, anything."""
    unsent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
    if exhausted(error):
        return _transient("this server has no file descriptor left for a connection", target, ambiguous=not unsent)
    what = "could not connect to the provider" if unsent else "the connection to the provider broke"
    return _transient(f"{what}: {str(error) or type(error).__name__}", target, ambiguous=not unsent)
