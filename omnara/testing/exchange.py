"""One request and its answer, from the body that arrives to the outcome in the log."""

from __future__ import annotations

import asyncio
from typing import Protocol, assert_never

from aiohttp import web
from msgspec.structs import replace

from omnara.testing.answer import Answer, Timing
from omnara.testing.conversation import Conversation
from omnara.testing.fast import NOT_CACHED, Templates, halves, new_token, reply_to
from omnara.testing.faults import Content, Cut, Drip, Fault, FaultQueue, HttpError, NoHeaders, Silence, StreamError
from omnara.testing.formats import Rules, accept, estimate_tokens, key_of
from omnara.testing.gates import Gate, Gates, point_of
from omnara.testing.playback import Performance, Player, StreamFault, stop_at
from omnara.testing.prompt_cache import Cached, PromptCache
from omnara.testing.request_log import Entry, RequestLog
from omnara.testing.script import Script, ScriptError
from omnara.testing.signatures import Signer
from omnara.testing.spoil import spoil
from omnara.testing.strict import ModelSpec, Refused, Strictness
from omnara.testing.wire import Problem

_EVENT_STREAM = "text/event-stream; charset=utf-8"
_JSON = "application/json"


class Host(Protocol):
    """What an exchange uses of its server."""

    script: Script
    strictness: Strictness | None
    fast: bool
    timing: Timing
    faults: FaultQueue
    gates: Gates
    log: RequestLog
    signer: Signer
    templates: Templates
    cache: PromptCache
    closing: asyncio.Event


class Exchange:
    """Answers one request. The outcome is in the log before the response ends, and before a cancellation goes on."""

    def __init__(self, host: Host, rules: Rules, request: web.BaseRequest) -> None:
        self._host = host
        self._rules = rules
        self._wire = rules.wire
        self._request = request
        self._token = new_token()

    async def run(self) -> web.StreamResponse:
        """Return the finished response. Cancelled when the client goes away: outcome `gone`."""
        raw, too_large = b"", False
        try:
            raw = await self._request.read()
        except web.HTTPRequestEntityTooLarge:
            too_large = True
        log = self._host.log
        entry = log.open(path=self._request.path, wire=self._wire.format, headers=self._request.headers, raw=raw)
        if too_large:
            return self._refuse(self._wire.status_problem(413), entry)
        try:
            return await self._answer(raw, entry)
        except Refused as refused:
            return self._refuse(refused.problem, entry)
        except ScriptError as error:
            log.close(entry, "script_error", status=500, detail=str(error))
            return self._error(replace(self._wire.status_problem(500), message=f"script: {error}"), {})
        except asyncio.CancelledError:
            log.close(entry, "stopped" if self._host.closing.is_set() else "gone")
            raise
        except ConnectionError:
            # The client went away a moment before its handler is cancelled. Raised, it would be printed as our fault.
            log.close(entry, "stopped" if self._host.closing.is_set() else "gone")
            return web.Response(status=500)
        except Exception as error:
            # A bug in a test's own script: aiohttp answers 500 and logs the traceback.
            log.close(entry, "script_error", status=500, detail=repr(error))
            raise

    async def _answer(self, raw: bytes, entry: Entry) -> web.StreamResponse:
        host = self._host
        conversation = accept(self._rules, raw, self._request.headers, host.strictness, host.signer)
        self._describe(conversation, entry)
        if host.fast and not host.gates and not host.faults.active:
            quick = self._quick(conversation, entry)
            if quick is not None:
                return quick
        answer, fault = self._choose(conversation, entry)
        gates = host.gates.for_request(conversation)
        for gate in gates:
            if point_of(gate) is None:
                await gate.hold()
        timing = answer.timing or host.timing
        if timing.delay_ms:
            await asyncio.sleep(timing.delay_ms / 1000)
        return await self._deliver(conversation, answer, fault, gates, timing, entry, estimate_tokens(raw))

    def _describe(self, conversation: Conversation, entry: Entry) -> None:
        log = self._host.log
        if log.bodies:
            conversation.key = key_of(conversation)
            conversation.attempt = log.attempt(conversation.key, conversation.turn)
        entry.key = conversation.key
        entry.model = conversation.model
        entry.turn = conversation.turn
        entry.attempt = conversation.attempt
        entry.stream = conversation.glance.stream
        log.touch()

    def _choose(self, conversation: Conversation, entry: Entry) -> tuple[Answer, Fault | None]:
        """The script's answer and the fault that strikes: a queued one goes before the answer's own."""
        answer = self._host.script(conversation)
        fault = self._host.faults.take(conversation)
        if fault is None and conversation.attempt <= answer.fault_attempts:
            fault = answer.fault
        if isinstance(fault, Content):
            entry.fault = "content:" + fault.kind
            return spoil(answer, fault), None
        entry.fault = None if fault is None else str(type(fault).__struct_config__.tag)
        self._host.log.touch()
        return answer, fault

    def _quick(self, conversation: Conversation, entry: Entry) -> web.StreamResponse | None:
        answer = self._host.script(conversation)
        timing = answer.timing or self._host.timing
        if answer.fault is not None or not timing.immediate():
            return None
        glance = conversation.glance
        body = self._host.templates.body(self._wire, answer, glance)
        self._host.log.close(entry, "answered", status=200)
        return web.Response(body=body, headers=self._headers(stream=glance.stream))

    async def _deliver(
        self,
        conversation: Conversation,
        answer: Answer,
        fault: Fault | None,
        gates: list[Gate],
        timing: Timing,
        entry: Entry,
        tokens: int,
    ) -> web.StreamResponse:
        match fault:
            case HttpError():
                return self._http_error(fault, entry)
            case NoHeaders():
                return await self._no_headers(fault, entry)
            case StreamError() if not conversation.glance.stream:
                return self._http_error(HttpError(529 if self._wire.format == "anthropic" else 503), entry)
            case StreamError() | Cut() | Silence() | Drip() | None:
                return await self._play(conversation, answer, fault, gates, timing, entry, tokens)
            case Content():
                raise AssertionError("content faults change the answer before this point")
            case _:
                assert_never(fault)

    async def _play(
        self,
        conversation: Conversation,
        answer: Answer,
        fault: StreamFault | None,
        gates: list[Gate],
        timing: Timing,
        entry: Entry,
        tokens: int,
    ) -> web.StreamResponse:
        glance = conversation.glance
        reply = reply_to(glance, self._token, tokens, self._host.signer, self._cached(conversation, answer))
        timed = replace(answer, timing=timing)
        frames = self._wire.frames(timed, reply) if glance.stream else halves(self._wire.document(timed, reply))
        error = b""
        if isinstance(fault, StreamError):
            error = self._wire.stream_error(fault, stop_at(fault, frames), reply)
        show = Performance(
            frames=frames,
            timing=timing,
            gates=gates,
            fault=fault,
            error=error,
            keepalive=self._wire.keepalive if glance.stream else b" ",
            entry=entry,
            closing=self._host.closing,
        )
        response = web.StreamResponse(headers=self._headers(stream=glance.stream))
        entry.status = 200
        await Player(self._request, response, show).play()
        self._host.log.close(entry, "answered" if fault is None else "fault")
        return response

    def _cached(self, conversation: Conversation, answer: Answer) -> Cached:
        """Prompt caching is reported by a strict server, for answers that state no usage of their own."""
        strictness = self._host.strictness
        if strictness is None or answer.usage is not None:
            return NOT_CACHED
        spec = strictness.model(conversation.model) or ModelSpec()
        return self._host.cache.visit(conversation.format, conversation.body, spec.cache_minimum)

    async def _no_headers(self, fault: NoHeaders, entry: Entry) -> web.StreamResponse:
        if not fault.drop:
            await self._host.closing.wait()
        if self._request.transport is not None:
            self._request.transport.abort()
        self._host.log.close(entry, "fault")
        return web.Response(status=500)

    def _http_error(self, fault: HttpError, entry: Entry) -> web.Response:
        usual = self._wire.status_problem(fault.status)
        problem = Problem(
            message=fault.message or usual.message,
            status=fault.status,
            error_type=fault.error_type or usual.error_type,
            code=fault.code or usual.code,
        )
        self._host.log.close(entry, "fault", status=fault.status, detail=problem.message)
        if fault.body is not None:
            return web.Response(status=fault.status, text=fault.body, headers=fault.headers)
        return self._error(problem, fault.headers)

    def _refuse(self, problem: Problem, entry: Entry) -> web.Response:
        self._host.log.close(entry, "refused", status=problem.status, detail=problem.message)
        return self._error(problem, {})

    def _error(self, problem: Problem, headers: dict[str, str]) -> web.Response:
        body = self._wire.error(problem, "req_" + self._token)
        return web.Response(body=body, status=problem.status, headers={**self._headers(stream=False), **headers})

    def _headers(self, *, stream: bool) -> dict[str, str]:
        kind = _EVENT_STREAM if stream else _JSON
        return {"content-type": kind, "cache-control": "no-cache", self._wire.request_id_header: "req_" + self._token}
