"""The client against a server that misbehaves: retries only what may be repeated, streams that survive everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from omnara.client import ApiError, Client, Delta, Event, ServerUnreachable, StreamBroken, ToolCallUpdate, turn_is_over
from omnara.client import stream as streams
from omnara.client.stream import EventStream
from omnara.clock import monotonic

AGENT = "agt_agktlwj56547xndg7kih7il7ty"
BASE = "/api/v1/orgs/o/projects/p/agents/a"
LINKS = {
    "inputs": f"{BASE}/inputs",
    "events": f"{BASE}/events",
    "stream": f"{BASE}/events/stream",
    "tool_calls": f"{BASE}/tool-calls",
    "interactions": f"{BASE}/interactions",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(sequence: int, kind: str = "tool_result", **fields: Any) -> dict[str, Any]:
    return {
        "id": f"evt_{sequence}",
        "sequence": sequence,
        "event_kind": kind,
        "turn_id": "trn_1",
        "turn_sequence": 1,
        "created_at": "2026-01-01T00:00:00Z",
        **fields,
    }


def frame(sequence: int, **fields: Any) -> bytes:
    data = event(sequence, **fields)
    return f"id: {sequence}\nevent: {data['event_kind']}\ndata: {json.dumps(data)}\n\n".encode()


@asynccontextmanager
async def serving(routes: dict[tuple[str, str], Handler]) -> AsyncIterator[Client]:
    app = web.Application()

    async def status(_request: web.Request) -> web.Response:
        return web.json_response({"id": AGENT, "status": "idle", "links": LINKS})

    for (method, path), handler in {("GET", f"/agents/{AGENT}"): status, **routes}.items():
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with Client(f"http://127.0.0.1:{port}", "key", retry_for_s=20) as client:
            yield client
    finally:
        await runner.cleanup()


def scripted(*connections: Callable[[web.StreamResponse], Awaitable[None]] | int) -> tuple[Handler, list[str | None]]:
    """A stream handler that plays one script per connection, and the Last-Event-IDs it was asked with."""
    asked: list[str | None] = []
    left = list(connections)

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Last-Event-ID"))
        play = left.pop(0)
        if isinstance(play, int):
            return web.json_response({"error": "no", "code": "service_unavailable"}, status=play)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": ok\n\n")
        await play(response)
        return response

    return handler, asked


def sends(*frames: bytes) -> Callable[[web.StreamResponse], Awaitable[None]]:
    async def play(response: web.StreamResponse) -> None:
        for data in frames:
            await response.write(data)

    return play


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.EventStream.__init__, "__kwdefaults__", {"silence_s": 30.0, "backoff_s": (0.001, 0.01)})


async def take(stream: EventStream, count: int) -> list[int]:
    sequences: list[int] = []
    async for item in stream:
        assert isinstance(item, Event)
        sequences.append(item.sequence)
        if len(sequences) == count:
            break
    return sequences


async def test_a_stream_goes_on_over_cuts_refusals_and_repetitions() -> None:
    handler, asked = scripted(
        sends(frame(1), frame(2), b'id: 3\nevent: tool_result\ndata: {"half'),
        503,
        429,
        sends(frame(2), frame(3), b'event: error\ndata: {"error": "x", "code": "service_unavailable"}\n\n'),
        408,
        sends(frame(3), frame(4)),
    )
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT) as stream:
        assert await take(stream, 4) == [1, 2, 3, 4]
        assert stream.reconnects == 5
        assert stream.last_sequence == 4
    assert asked == ["0", "2", "2", "2", "3", "3"]


async def test_the_stream_of_an_archived_agent_ends() -> None:
    """The server closes a stream for many reasons; only this one is for good."""
    answers = ["running", "archived"]

    async def status(_request: web.Request) -> web.Response:
        found = answers.pop(0) if len(asked) > 0 and answers else "running"
        return web.json_response({"id": AGENT, "status": found, "links": LINKS})

    handler, asked = scripted(sends(frame(1)), sends(frame(2)))
    routes = {("GET", f"/agents/{AGENT}"): status, ("GET", LINKS["stream"]): handler}
    async with serving(routes) as client, client.stream(AGENT) as stream:
        assert [item.sequence async for item in stream if isinstance(item, Event)] == [1, 2]
        assert stream.reconnects == 1
    assert asked == ["0", "1"]


async def test_silence_is_a_broken_connection_and_heartbeats_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams.EventStream.__init__, "__kwdefaults__", {"silence_s": 0.3, "backoff_s": (0.001, 0.01)})

    async def quiet(response: web.StreamResponse) -> None:
        await response.write(frame(1))
        await asyncio.sleep(30)

    async def beating(response: web.StreamResponse) -> None:
        for _ in range(8):
            await response.write(b": heartbeat\n\n")
            await asyncio.sleep(0.1)
        await response.write(frame(2))
        await asyncio.sleep(30)

    handler, asked = scripted(quiet, beating, beating, beating)
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT) as stream:
        assert await take(stream, 2) == [1, 2]
        # One more when this process stood still meanwhile; if heartbeats were no sign of life, one after the other.
        assert stream.reconnects in (1, 2)
    assert asked == ["0", "1", "1"][: stream.reconnects + 1]


async def test_an_internal_error_ends_the_stream() -> None:
    handler, _ = scripted(sends(frame(1), b'event: error\ndata: {"error": "bug", "code": "internal_error"}\n\n'))
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT) as stream:
        assert await take(stream, 1) == [1]
        with pytest.raises(StreamBroken, match="internal_error"):
            await anext(stream)


async def test_a_gap_is_asked_for_once_and_then_refused() -> None:
    handler, asked = scripted(sends(frame(1), frame(3)), sends(frame(2), frame(3)), sends(frame(5)), sends(frame(5)))
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT) as stream:
        assert await take(stream, 3) == [1, 2, 3]
        with pytest.raises(StreamBroken, match="gap after 3"):
            await anext(stream)
    assert asked == ["0", "1", "3", "3"]


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_refusal_that_no_repetition_cures_is_raised(status: int) -> None:
    handler, asked = scripted(status)
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT) as stream:
        with pytest.raises(ApiError) as caught:
            await anext(stream)
    assert caught.value.status == status
    assert len(asked) == 1


async def test_previews_pass_and_unknown_frames_do_not() -> None:
    delta = {"turn_id": "t", "model_call_context_id": "m", "seq": 1, "event": {"kind": "text_delta"}, "new_field": 1}
    update = {"tool_call_id": "tcl_1", "state": "running"}
    handler, _ = scripted(
        sends(
            f"event: model_output_delta\ndata: {json.dumps(delta)}\n\n".encode(),
            b"event: from_the_future\ndata: {}\n\n",
            f"event: tool_call_update\ndata: {json.dumps(update)}\n\n".encode(),
        )
    )
    async with serving({("GET", LINKS["stream"]): handler}) as client, client.stream(AGENT, deltas=True) as stream:
        first, second = await anext(stream), await anext(stream)
    assert isinstance(first, Delta)
    assert second == ToolCallUpdate("tcl_1", "running")


async def test_leaving_the_block_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(frame(1))
        try:
            while True:
                await response.write(b": heartbeat\n\n")
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()
        return response

    async with serving({("GET", LINKS["stream"]): endless}) as client:
        async with client.stream(AGENT) as stream:
            await anext(stream)
        await asyncio.wait_for(gone.wait(), 20)


async def test_a_message_is_repeated_with_the_same_key() -> None:
    keys: list[str | None] = []

    async def inputs(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Idempotency-Key"))
        if len(keys) == 1:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if len(keys) == 2:
            return web.json_response({"error": "busy", "code": "x"}, status=503, headers={"Retry-After": "0"})
        found = {"id": "ain_1", "agent_id": AGENT, "state": "received", "delivery_mode": "queued"}
        return web.json_response({"agent_input": found}, status=201)

    async with serving({("POST", LINKS["inputs"]): inputs}) as client:
        accepted = await client.send(AGENT, "hello")
    assert accepted.id == "ain_1"
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0]


async def test_a_tool_result_is_never_repeated_by_the_client() -> None:
    calls = 0

    async def result(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving({("POST", f"{LINKS['tool_calls']}/tcl_1/result"): result}) as client:
        with pytest.raises(ServerUnreachable):
            await client.answer_call(AGENT, "tcl_1", "text")
    assert calls == 1


async def test_errors_carry_the_code_and_do_not_need_json() -> None:
    async def refused(_request: web.Request) -> web.Response:
        return web.json_response({"error": "it is archived", "code": "state_transition_conflict"}, status=409)

    async def proxy(_request: web.Request) -> web.Response:
        return web.Response(status=403, text="<html>")

    routes = {("POST", f"/agents/{AGENT}/pause"): refused, ("POST", f"/agents/{AGENT}/resume"): proxy}
    async with serving(routes) as client:
        with pytest.raises(ApiError, match="it is archived") as caught:
            await client.pause(AGENT)
        assert caught.value.code == "state_transition_conflict"
        with pytest.raises(ApiError) as caught:
            await client.resume(AGENT)
        assert (caught.value.status, caught.value.code) == (403, "unknown")


async def test_no_server_is_told_in_time() -> None:
    async with Client("http://127.0.0.1:1", "key", retry_for_s=0.3) as client:
        begun = monotonic()
        with pytest.raises(ServerUnreachable):
            await client.status(AGENT)
        assert monotonic() - begun < 30


async def test_events_are_read_page_by_page() -> None:
    async def page(request: web.Request) -> web.Response:
        after = int(request.query["after_sequence"])
        data = [event(number) for number in range(after + 1, min(after + 3, 6))]
        return web.json_response({"data": data, "next_after_sequence": after + len(data), "has_more": after < 4})

    async with serving({("GET", LINKS["events"]): page}) as client:
        assert [found.sequence async for found in client.events(AGENT)] == [1, 2, 3, 4, 5]


CALL = {"type": "tool_call", "tool_call_id": "tcl_1", "tool_type": "custom", "name": "x", "input": {}}
TEXT = {"type": "text", "text": "hi"}
CONFIG = event(1, "agent_input", input_kind="config_change", is_opening_event=True)
ANSWERED = event(4, "agent_input", input_kind="interaction_response")
MESSAGE = event(2, "agent_input", input_kind="content", is_opening_event=True)


@pytest.mark.parametrize(
    ("log", "over"),
    [
        ([], False),
        ([CONFIG], True),
        ([CONFIG, MESSAGE], False),
        ([CONFIG, MESSAGE, event(3, "model_output", content_blocks=[TEXT, CALL])], False),
        ([CONFIG, MESSAGE, event(3, "model_output", content_blocks=[CALL]), event(4, "tool_result")], False),
        ([CONFIG, MESSAGE, event(3, "model_output", content_blocks=[TEXT], stop_reason="end_turn")], True),
        ([event(3, "model_output", content_blocks=[TEXT]), event(4, "context_checkpoint")], True),
        ([event(3, "model_output", content_blocks=[CALL]), event(4, "agent_input", input_kind="control")], True),
        ([event(3, "model_output", content_blocks=[CALL]), event(4, "agent_input", input_kind="config_change")], False),
        ([event(3, "model_output", content_blocks=[CALL]), ANSWERED], False),
    ],
)  # fmt: skip
def test_the_turn_over_rule(log: list[dict[str, Any]], over: bool) -> None:
    assert turn_is_over([msgspec.convert(entry, Event) for entry in log]) is over
