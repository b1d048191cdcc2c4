"""Faults, pace and gates, seen from a plain HTTP client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest

from omnara.testing import (
    Answer,
    Call,
    Content,
    Cut,
    Drip,
    Fault,
    HttpError,
    Match,
    ModelServer,
    NoHeaders,
    Silence,
    StreamError,
    Text,
    Thinking,
    Timing,
    embed,
    fixed,
    overloaded,
    plan,
    rate_limited,
    say,
)
from tests.unit.test_model_server import ANTHROPIC, CHAT, KEYS, PATHS, RESPONSES, body_for, events, send

LONG = Answer(
    blocks=(Thinking("I think about this for a while."), Text("t" * 120), Call("f", {"path": "a" * 60})),
    timing=Timing(),
)
STREAM = {"stream": True}


class Partial:
    """What arrived of a stream, and how it ended."""

    def __init__(self) -> None:
        self.data = b""
        self.end = "open"

    @property
    def events(self) -> list[Any]:
        return events(self.data.decode(errors="surrogateescape").rpartition("\n\n")[0] + "\n")


async def read(server: ModelServer, path: str, body: dict[str, Any], *, quiet: float = 20) -> Partial:
    """Read a stream until it ends, breaks or, having begun, says nothing for `quiet` seconds."""
    got = Partial()
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body, headers=KEYS) as response,
    ):
        assert response.status == 200
        try:
            while True:
                async with asyncio.timeout(quiet if got.data else 20):
                    piece = await response.content.readany()
                if not piece:
                    got.end = "closed"
                    return got
                got.data += piece
        except TimeoutError:
            got.end = "silent"
        except aiohttp.ClientPayloadError:
            got.end = "broken"
    return got


def texts(path: str, found: list[Any]) -> str:
    """The text deltas of a stream, joined."""
    if path == ANTHROPIC:
        return "".join(e["delta"]["text"] for e in found if e.get("delta", {}).get("type") == "text_delta")
    if path == CHAT:
        return "".join(c["delta"].get("content") or "" for e in found for c in e.get("choices", []))
    return "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")


def arguments(path: str, found: list[Any]) -> str:
    """The argument deltas of a stream, joined."""
    if path == ANTHROPIC:
        return "".join(e["delta"]["partial_json"] for e in found if "partial_json" in e.get("delta", {}))
    if path == CHAT:
        calls = [t for e in found for c in e.get("choices", []) for t in c["delta"].get("tool_calls", [])]
        return "".join(call["function"]["arguments"] for call in calls)
    return "".join(e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta")


def error_of(path: str, event: Any) -> tuple[str, str]:
    """Kind and message of an error event."""
    if path == ANTHROPIC:
        assert event["type"] == "error"
        return event["error"]["type"], event["error"]["message"]
    if path == CHAT:
        return event["error"]["type"], event["error"]["message"]
    assert event["type"] == "error"
    return event["code"], event["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", ["2", "Thu, 01 Jan 2099 00:00:00 GMT", "3600", "-5", "nan", "soon"])
async def test_any_retry_after_goes_out_as_it_is(path: str, header: str) -> None:
    async with ModelServer(fixed()) as server, aiohttp.ClientSession() as session:
        server.faults.push(rate_limited(header, retry_after_ms="500"))
        async with session.post(server.url + path, json=body_for(path), headers=KEYS) as response:
            assert response.status == 429
            assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == (header, "500")
        assert (await send(server, path, body_for(path)))[0] == 200


@pytest.mark.parametrize(
    ("status", "anthropic", "openai"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "invalid_request_error"),
        (402, "billing_error", "insufficient_quota"),
        (403, "permission_error", "invalid_request_error"),
        (404, "not_found_error", "invalid_request_error"),
        (413, "request_too_large", "invalid_request_error"),
        (429, "rate_limit_error", "requests"),
        (500, "api_error", "server_error"),
        (503, "api_error", "server_error"),
        (529, "overloaded_error", "server_error"),
    ],
)
async def test_error_statuses_have_the_provider_s_body(status: int, anthropic: str, openai: str) -> None:
    async with ModelServer(fixed()) as server:
        for path in PATHS:
            server.faults.push(HttpError(status))
            found, answer, _ = await send(server, path, body_for(path, stream=True))
            assert (found, answer["error"]["type"]) == (status, anthropic if path == ANTHROPIC else openai)
            assert server.log.last.outcome == "fault"
        assert server.log.counts.faults == 3


async def test_an_error_may_say_anything() -> None:
    async with ModelServer(fixed()) as server:
        server.faults.push(HttpError(400, error_type="odd", message="no credit", code="c"), overloaded())
        server.faults.push(HttpError(502, body="<html>Bad gateway</html>"))
        _, answer, _ = await send(server, CHAT, body_for(CHAT))
        assert answer["error"] == {"message": "no credit", "type": "odd", "param": None, "code": "c"}
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[0] == 529
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[2] == "<html>Bad gateway</html>"


@pytest.mark.parametrize("path", PATHS)
async def test_error_events_inside_a_stream(path: str) -> None:
    async with ModelServer(lambda _: LONG) as server:
        seen = {}
        for at in ("first_delta", "mid_text", "mid_arguments"):
            server.faults.push(StreamError(at))
            got = await read(server, path, body_for(path, **STREAM))
            assert got.end == "closed"
            kind, message = error_of(path, got.events[-1])
            assert (kind, message) == ("overloaded_error" if path == ANTHROPIC else "server_error", "Overloaded")
            assert b"[DONE]" not in got.data
            seen[at] = (texts(path, got.events[:-1]), arguments(path, got.events[:-1]))
        assert seen["first_delta"] == ("", "")
        assert 0 < len(seen["mid_text"][0]) < 120
        assert seen["mid_text"][1] == ""
        assert seen["mid_arguments"][0] == "t" * 120
        assert '{"path":"aaa' in seen["mid_arguments"][1]
        assert not seen["mid_arguments"][1].endswith("}")


async def test_a_failed_response_is_the_other_way_to_say_it() -> None:
    async with ModelServer(lambda _: LONG) as server:
        server.faults.push(StreamError("mid_text", error_type="rate_limit_exceeded", message="slow down", failed=True))
        last = (await read(server, RESPONSES, body_for(RESPONSES, **STREAM))).events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "rate_limit_exceeded", "message": "slow down"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("clean", "end"), [(True, "closed"), (False, "broken")])
async def test_cut_streams(path: str, clean: bool, end: str) -> None:
    async with ModelServer(lambda _: LONG) as server:
        server.faults.push(Cut("mid_text", clean=clean), Cut("end", clean=clean), Cut(frames=0, clean=clean))
        half, whole, none = [await read(server, path, body_for(path, **STREAM)) for _ in range(3)]
    assert [half.end, whole.end, none.end] == [end] * 3
    assert 0 < len(texts(path, half.events)) < 120
    assert arguments(path, whole.events) == json.dumps({"path": "a" * 60}, separators=(",", ":"))
    assert b"message_delta" not in whole.data
    assert b'finish_reason":"' not in whole.data
    assert b"response.completed" not in whole.data
    assert none.data == b""


async def test_thinking_cut_before_its_signature() -> None:
    async with ModelServer(lambda _: LONG) as server:
        server.faults.push(Cut("before_signature"))
        got = await read(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM))
    kinds = [event["delta"]["type"] for event in got.events if "delta" in event]
    assert set(kinds) == {"thinking_delta"}
    assert "".join(event["delta"]["thinking"] for event in got.events if "delta" in event) == LONG.blocks[0].text


@pytest.mark.parametrize("path", PATHS)
async def test_silence_keeps_the_socket_open_and_sees_the_client_leave(path: str) -> None:
    async with ModelServer(lambda _: LONG) as server:
        server.faults.push(Silence(frames=3))
        got = await read(server, path, body_for(path, **STREAM), quiet=0.2)
        assert got.end == "silent"
        assert got.data
        await server.log.until(lambda log: log.counts.gone == 1)
        assert (server.log.last.outcome, server.log.last.frames) == ("gone", 3)


@pytest.mark.parametrize("path", PATHS)
async def test_drip_keeps_an_idle_timer_happy(path: str) -> None:
    async with ModelServer(lambda _: LONG) as server, aiohttp.ClientSession() as session:
        server.faults.push(Drip(interval_ms=10))
        async with session.post(server.url + path, json=body_for(path, **STREAM), headers=KEYS) as response:
            async with asyncio.timeout(20):
                data = b""
                while data.count(b"ping" if path == ANTHROPIC else b": keep-alive") < 6:
                    data += await response.content.readany()
        assert texts(path, events(data.decode())) == ""
        await server.log.until(lambda log: log.counts.gone == 1)


@pytest.mark.parametrize("path", PATHS)
async def test_headers_never_sent(path: str) -> None:
    async with ModelServer(fixed()) as server:
        server.faults.push(NoHeaders())
        asked = asyncio.create_task(send(server, path, body_for(path)))
        await server.log.until(lambda log: any(entry.fault == "no_headers" for entry in log.entries))
        assert not asked.done()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await server.log.until(lambda log: log.counts.gone == 1)
        server.faults.push(NoHeaders(drop=True))
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await send(server, path, body_for(path))


async def test_stopping_lets_go_of_silent_and_held_requests() -> None:
    server = await ModelServer(lambda _: LONG).start()
    gate = server.gate("request", match=Match(contains="held"))
    server.faults.push(Silence("mid_text"), Drip(60_000), NoHeaders(), match=Match(contains="quiet"))

    async def ask(text: str) -> str:
        try:
            await send(server, ANTHROPIC, body_for(ANTHROPIC, text=text, **STREAM))
        except (aiohttp.ClientError, ConnectionError) as error:
            return type(error).__name__
        return "answered"

    tasks = [asyncio.create_task(ask(text)) for text in ("quiet", "quiet", "quiet", "held")]
    await gate.reached()
    await server.log.until(lambda log: sum(entry.fault is not None for entry in log.entries) == 3)
    started = time.monotonic()
    await server.stop()
    outcomes = await asyncio.gather(*tasks)
    assert time.monotonic() - started < 30
    assert outcomes[:3] == ["ClientPayloadError", "ClientPayloadError", "ServerDisconnectedError"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", [Cut("mid_text"), Silence("mid_text"), Drip(interval_ms=10), StreamError()])
async def test_documents_can_be_struck_too(path: str, fault: Fault) -> None:
    async with ModelServer(fixed("x" * 100)) as server:
        server.faults.push(fault)
        if isinstance(fault, StreamError):
            assert (await send(server, path, body_for(path)))[0] == (529 if path == ANTHROPIC else 503)
            return
        got = await read(server, path, body_for(path), quiet=0.2) if not isinstance(fault, Drip) else None
        if got is not None:
            assert got.end == ("broken" if isinstance(fault, Cut) else "silent")
            with pytest.raises(json.JSONDecodeError):
                json.loads(got.data)
            return
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await send(server, path, body_for(path))


@pytest.mark.parametrize("path", PATHS)
async def test_awkward_contents(path: str) -> None:
    answer = Answer(blocks=(Text("fine"), Call("f", {"path": "abc"})))
    async with ModelServer(lambda _: answer) as server:
        for kind in ("empty", "empty_text", "blank_text", "split_surrogates", "lone_surrogate", "nul"):
            server.faults.push(Content(kind))
        empty, no_text, blank, split, lone, nul = [await read(server, path, body_for(path, **STREAM)) for _ in range(6)]
    assert (texts(path, empty.events), arguments(path, empty.events)) == ("", "")
    assert (texts(path, no_text.events), arguments(path, no_text.events)) == ("", '{"path":"abc"}')
    assert texts(path, blank.events) == " \n "
    assert texts(path, split.events) == "smile \ud83d\ude00 done"
    assert rb'"\ud83d"' in split.data
    assert rb'"\ude00"' in split.data
    assert texts(path, lone.events) == "broken \ud83d done"
    assert texts(path, nul.events) == "a\0b and \\u0000"


@pytest.mark.parametrize("path", PATHS)
async def test_arguments_that_end_in_the_middle(path: str) -> None:
    answer = Answer(blocks=(Call("f", {"path": "abcdefgh"}),))
    async with ModelServer(lambda _: answer) as server:
        server.faults.push(Content("half_arguments"), Content("half_arguments", stop="tool_use"))
        cut, called = [await read(server, path, body_for(path, **STREAM)) for _ in range(2)]
        server.faults.push(Content("half_arguments"))
        assert (await send(server, path, body_for(path)))[0] == 200
    assert arguments(path, cut.events) == '{"path":"'
    assert arguments(path, called.events) == '{"path":"'
    shown = {ANTHROPIC: b'"max_tokens"', CHAT: b'"length"', RESPONSES: b"response.incomplete"}[path]
    assert shown in cut.data
    assert shown not in called.data


async def test_faults_strike_who_they_are_meant_for() -> None:
    async with ModelServer(fixed()) as server:
        server.faults.push(HttpError(500), match=Match(format="chat"))
        server.faults.push(HttpError(503), skip=1, times=2, match=Match(contains="twice"))
        server.faults.push(HttpError(529), times=-1, match=Match(model="scripted-2"))

        async def status(path: str, text: str = "hi", model: str = "scripted") -> int:
            return (await send(server, path, body_for(path, text=text, model=model)))[0]

        assert [await status(ANTHROPIC), await status(CHAT), await status(CHAT)] == [200, 500, 200]
        assert [await status(ANTHROPIC, "do it twice") for _ in range(4)] == [200, 503, 503, 200]
        assert [await status(ANTHROPIC, model="scripted-2") for _ in range(3)] == [529, 529, 529]
        assert len(server.faults) == 1
        server.reset()
        assert await status(ANTHROPIC, model="scripted-2") == 200


async def test_faults_in_rotation() -> None:
    async with ModelServer(fixed()) as server:
        server.faults.every(3, HttpError(500), HttpError(429))
        statuses = [(await send(server, ANTHROPIC, body_for(ANTHROPIC)))[0] for _ in range(9)]
        server.faults.clear()
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[0] == 200
    assert statuses == [200, 200, 500, 200, 200, 429, 200, 200, 500]


async def test_the_fault_queue_is_bounded() -> None:
    async with ModelServer(fixed()) as server:
        with pytest.raises(OverflowError):
            server.faults.push(*[HttpError(500)] * 10_001)


async def test_an_answer_may_fail_a_number_of_times() -> None:
    once = Answer(blocks=(Text("at last"),), fault=HttpError(500), fault_attempts=2)
    async with ModelServer() as server:
        body = body_for(ANTHROPIC, text=embed(once))
        statuses = [(await send(server, ANTHROPIC, body))[0] for _ in range(3)]
        assert [entry.attempt for entry in server.log.entries] == [1, 2, 3]
        assert server.log.counts.repeats == 2
    assert statuses == [500, 500, 200]


@pytest.mark.parametrize("path", PATHS)
async def test_gates_hold_a_stream_where_they_say(path: str) -> None:
    async with ModelServer(lambda _: LONG) as server, aiohttp.ClientSession() as session:
        gates = [server.gate(at) for at in ("first_delta", "mid_text", "mid_arguments", "end")]
        ends = (
            lambda e: True,
            lambda e: texts(path, e),
            lambda e: arguments(path, e),
            lambda e: "}" in arguments(path, e),
        )
        frames, arrived = [], []
        async with session.post(server.url + path, json=body_for(path, **STREAM), headers=KEYS) as response:
            got = Partial()
            for gate, enough in zip(gates, ends, strict=True):
                await gate.reached()
                assert gate.held == 1
                frames.append(server.log.last.frames)
                async with asyncio.timeout(20):
                    while not got.data or not enough(got.events):
                        got.data += await response.content.readany()
                arrived.append((len(texts(path, got.events)), len(arguments(path, got.events))))
                gate.release()
            got.data += await response.read()
        assert frames == sorted(set(frames))
        assert arrived[0] == (0, 0)
        assert 0 < arrived[1][0] < 120
        assert arrived[1][1] == 0
        assert arrived[2][0] == 120
        assert 0 < arrived[2][1] < arrived[3][1] == len(json.dumps({"path": "a" * 60}, separators=(",", ":")))
        assert server.log.last.outcome == "answered"


async def test_a_gate_holds_before_the_headers_and_only_whom_it_wants() -> None:
    async with ModelServer(fixed()) as server:
        gate = server.gate(match=Match(contains="wait"))
        held = asyncio.create_task(send(server, ANTHROPIC, body_for(ANTHROPIC, text="wait here")))
        await gate.reached()
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC, text="go")))[0] == 200
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC, text="wait too")))[0] == 200
        assert not held.done()
        gate.release()
        assert (await held)[0] == 200
        assert (gate.held, gate.arrivals) == (0, 1)


async def test_a_gate_waits_for_a_request_that_gets_as_far_as_its_point() -> None:
    async with ModelServer(lambda _: LONG) as server:
        server.faults.push(rate_limited("2"), Cut("first_delta"))
        gate = server.gate("mid_text")
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM)))[0] == 429
        assert (await read(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM))).end == "broken"
        assert gate.arrivals == 0
        held = asyncio.create_task(read(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM)))
        await gate.reached()
        assert (await read(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM))).end == "closed"
        gate.release()
        assert texts(ANTHROPIC, (await held).events) == "t" * 120
        assert gate.arrivals == 1


async def test_a_gate_that_nothing_reaches_times_out() -> None:
    async with ModelServer(fixed()) as server:
        with pytest.raises(TimeoutError):
            await server.gate().reached(timeout=0.01)


async def test_a_client_that_leaves_a_gate_is_noticed() -> None:
    async with ModelServer(fixed()) as server:
        gate = server.gate(times=-1)
        task = asyncio.create_task(send(server, ANTHROPIC, body_for(ANTHROPIC)))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.log.until(lambda log: log.counts.gone == 1)
        assert gate.held == 0


async def test_pace() -> None:
    timing = Timing(delay_ms=40, first_ms=40, tokens=5, token_ms=20)
    async with ModelServer(fixed("x" * 50), timing=timing) as server:
        started = time.monotonic()
        got = await read(server, ANTHROPIC, body_for(ANTHROPIC, **STREAM), quiet=20)
        took = time.monotonic() - started
    assert texts(ANTHROPIC, got.events) == "x" * 50
    assert took >= 0.155
    assert len([event for event in got.events if event["type"] == "content_block_delta"]) == 5


async def test_a_plan_may_set_its_own_pace() -> None:
    answer = Answer(blocks=(Text("slow"),), timing=Timing(delay_ms=50))
    async with ModelServer(plan(answer, say("fast"))) as server:
        started = time.monotonic()
        assert (await send(server, CHAT, body_for(CHAT)))[0] == 200
        assert time.monotonic() - started >= 0.049
