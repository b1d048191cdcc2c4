"""What the chat needs of the client: word of lost connections, the newest events, files beside a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from omnara.cli.chat.outbox import LIMIT, Message, Outbox, Resolution
from omnara.client import Client, Event
from tests.support.waiting import until
from tests.unit.test_client import AGENT, BASE, event, frame, scripted, serving

RESOLVED = {"id": "int_1", "interaction_kind": "question", "state": "resolved", "request": {}}
TAKEN = {"agent_input": {"id": "ain_1", "agent_id": AGENT, "state": "received", "delivery_mode": "queued"}}


async def test_the_reader_hears_of_lost_and_regained_connections() -> None:
    async def two(response: web.StreamResponse) -> None:
        await response.write(frame(1) + frame(2))

    async def third(response: web.StreamResponse) -> None:
        await response.write(frame(3))

    handler, asked = scripted(two, 503, third)
    heard: list[str | None] = []
    async with serving({("GET", f"{BASE}/events/stream"): handler}) as client:
        stream = client.stream(AGENT, on_connection=heard.append, max_wait_s=0.01)
        async with stream as items:
            sequences = [(await anext(items)).sequence for _ in range(3)]  # type: ignore[union-attr]
    assert sequences == [1, 2, 3]
    assert [reason is None for reason in heard] == [True, False, False, True]
    assert asked == ["0", "2", "2"]


async def test_the_newest_events_come_oldest_first() -> None:
    asked: list[dict[str, str]] = []

    async def events(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        body = {"data": [event(4), event(5)], "has_more": True, "next_before_sequence": 4, "next_after_sequence": 5}
        return web.json_response(body)

    async with serving({("GET", f"{BASE}/events"): events}) as client:
        found = await client.latest_events(AGENT, limit=2)
    assert [one.sequence for one in found] == [4, 5]
    assert isinstance(found[0], Event)
    assert asked == [{"before_sequence": "0", "limit": "2"}]


@pytest.mark.parametrize("text", ["look", ""])
async def test_files_stand_before_the_words(text: str) -> None:
    bodies: list[Any] = []

    async def inputs(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(TAKEN, status=201)

    async with serving({("POST", f"{BASE}/inputs"): inputs}) as client:
        await client.send(AGENT, text, attachments=[{"type": "media"}])
    words = [{"type": "text", "text": text}] if text else []
    assert bodies == [{"content_blocks": [{"type": "media"}, *words]}]


# --- the outbox -------------------------------------------------------------------------------------------


def collected(client: Client) -> tuple[Outbox, list[Any], list[Any]]:
    taken: list[Any] = []
    refused: list[Any] = []
    return Outbox(client, AGENT, taken.append, lambda item, why: refused.append((item, why))), taken, refused


async def test_what_was_said_is_sent_in_order_with_one_key_until_it_is_taken() -> None:
    seen: list[tuple[str | None, Any]] = []
    answers = [503, 503, 503, 201, 400, 200]

    async def any_post(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Idempotency-Key"), await request.json()))
        status = answers.pop(0)
        if status == 200:
            return web.json_response(
                {"id": "int_1", "interaction_kind": "question", "state": "resolved", "request": {}}
            )
        if status == 201:
            return web.json_response(TAKEN, status=201)
        return web.json_response({"error": "nobody is home", "code": "x"}, status=status)

    routes = {("POST", f"{BASE}/inputs"): any_post, ("POST", f"{BASE}/interactions/int_1/resolve"): any_post}
    async with serving(routes) as client:
        outbox, taken, refused = collected(client)
        first, second = Message("k1", "one", steering=True, cancels_forms=True), Message("k2", "two")
        answer = Resolution("int_1", ({"option_indices": [0]},))
        for item in (first, second, answer):
            assert outbox.put(item)
        assert outbox.unsent == 3
        async with sending(outbox):
            await until(lambda: not outbox.unsent, "all is sent", limit_s=20)
    assert taken == [first, answer]
    assert refused == [(second, "nobody is home")]
    assert [key for key, _ in seen] == ["k1"] * 4 + ["k2", None]
    assert seen[0][1] == {
        "content_blocks": [{"type": "text", "text": "one"}],
        "delivery_mode": "steering",
        "cancel_open_interactions": True,
    }
    assert seen[-1][1] == {"answers": [{"option_indices": [0]}]}


@contextlib.asynccontextmanager
async def sending(outbox: Outbox) -> AsyncIterator[None]:
    task = asyncio.create_task(outbox.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_outbox_is_bounded() -> None:
    async with serving({}) as client:
        outbox, _, _ = collected(client)
        assert all(outbox.put(Message(str(number), "x")) for number in range(LIMIT))
        assert not outbox.put(Message("one more", "x"))
