"""The log and the routes by which another process drives the server."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import aiohttp
import pytest

from omnara.testing import CONVERSATION_HEADER, ModelServer, fixed, run_mock_model
from omnara.testing.request_log import RequestLog
from tests.unit.test_model_server import ANTHROPIC, CHAT, KEYS, body_for, events, send


async def control(server: ModelServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Call a control route."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_the_log_has_every_request_and_no_key() -> None:
    async with ModelServer(fixed()) as server:
        body = json.dumps(body_for(ANTHROPIC, text="count me")).encode()
        await send(server, ANTHROPIC, body, {**KEYS, CONVERSATION_HEADER: "agent-1"})
        await send(server, CHAT, body_for(CHAT, text="me too", stream=True))
        await send(server, CHAT, body_for(CHAT, text=" "))
        first, second, third = server.log.entries
        assert (first.key, first.format, first.turn, first.attempt) == ("agent-1", "anthropic", 0, 1)
        assert (first.status, first.outcome, first.stream) == (200, "answered", False)
        assert first.raw == body
        assert first.headers["x-api-key"] == first.headers["authorization"] == "***"
        assert first.seconds >= 0
        assert (second.key, second.stream, second.outcome) == ("me too", True, "answered")
        assert second.frames > 3
        assert (third.status, third.outcome) == (400, "refused")
        assert server.log.of("agent-1") == [first]
        assert "secret" not in json.dumps([entry.public(bodies=False) for entry in server.log.entries])


async def test_the_log_is_read_from_outside() -> None:
    async with ModelServer(fixed()) as server:
        for text in ("a", "b", "a"):
            await send(server, ANTHROPIC, body_for(ANTHROPIC, text=text))
        _, everything = await control(server, "GET", "/__log")
        assert [entry["key"] for entry in everything["entries"]] == ["a", "b", "a"]
        assert "body" not in everything["entries"][0]
        _, of_a = await control(server, "GET", "/__log?key=a&since=1&bodies=1")
        (entry,) = of_a["entries"]
        assert entry["body"]["messages"][0]["content"] == "a"
        assert json.loads(base64.b64decode(entry["raw_base64"])) == entry["body"]
        _, counts = await control(server, "GET", "/__counts")
        assert (counts["requests"], counts["answered"], counts["repeats"]) == (3, 3, 1)
        assert counts["by_format"] == {"anthropic": 3}
        await control(server, "POST", "/__reset")
        assert (await control(server, "GET", "/__counts"))[1]["requests"] == 0


async def test_script_and_faults_are_set_from_outside() -> None:
    async with ModelServer(fixed()) as server:
        answers = [{"blocks": [{"type": "text", "text": "planned"}]}]
        assert await control(server, "POST", "/__script", {"plan": {"answers": answers}}) == (200, {"ok": True})
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[1]["content"][0]["text"] == "planned"
        faults = [{"fault": {"type": "http", "status": 500}, "times": 2, "match": {"format": "chat"}}]
        await control(server, "POST", "/__faults", faults)
        assert (await send(server, CHAT, body_for(CHAT)))[0] == 500
        assert (await send(server, ANTHROPIC, body_for(ANTHROPIC)))[0] == 200
        await control(server, "DELETE", "/__faults")
        assert (await send(server, CHAT, body_for(CHAT)))[0] == 200


async def test_gates_are_worked_from_outside() -> None:
    async with ModelServer(fixed()) as server:
        _, gate = await control(server, "POST", "/__gates", {"at": "first_delta"})
        task = asyncio.create_task(send(server, ANTHROPIC, body_for(ANTHROPIC, stream=True)))
        for _ in range(1000):
            _, seen = await control(server, "GET", f"/__gates/{gate['id']}")
            if seen["held"]:
                break
        assert seen == {"id": gate["id"], "held": 1, "arrivals": 1}
        await control(server, "POST", f"/__gates/{gate['id']}/release")
        status, _, text = await task
        assert (status, events(text)[-1]["type"]) == (200, "message_stop")
        assert (await control(server, "GET", f"/__gates/{gate['id']}"))[1]["held"] == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/__script", {"name": "nobody"}, 400),
        ("POST", "/__script", {"name": "fixed", "options": {"colour": "red"}}, 400),
        ("POST", "/__faults", [{"fault": {"type": "flood"}}], 400),
        ("POST", "/__faults", {"fault": 1}, 400),
        ("POST", "/__gates", {"at": "nowhere"}, 400),
        ("POST", "/__gates/9/release", None, 404),
        ("GET", "/__gates/9", None, 404),
        ("GET", "/__log?since=soon", None, 400),
        ("GET", "/__nothing", None, 404),
        ("POST", "/__nothing", None, 404),
    ],
)
async def test_control_requests_that_make_no_sense(method: str, path: str, body: Any, status: int) -> None:
    async with ModelServer(fixed()) as server:
        assert (await control(server, method, path, body))[0] == status


async def test_control_can_be_left_out() -> None:
    async with ModelServer(fixed(), control=False) as server:
        assert (await control(server, "GET", "/__log"))[0] == 404


async def test_the_log_is_bounded_and_says_so() -> None:
    async with ModelServer(fixed(), log_limit=2) as server:
        for _ in range(5):
            await send(server, ANTHROPIC, body_for(ANTHROPIC))
        assert [entry.number for entry in server.log.entries] == [4, 5]
        assert (server.log.counts.requests, server.log.counts.dropped) == (5, 3)


async def test_waiting_on_the_log() -> None:
    log = RequestLog()
    with pytest.raises(TimeoutError):
        await log.until(lambda _: False, timeout=0.01)
    waiting = asyncio.gather(*(log.until(lambda seen: seen.counts.answered == 1) for _ in range(3)))
    await asyncio.sleep(0)
    log.close(log.open(path="/", wire="chat", headers={}, raw=b""), "answered")
    await waiting


async def test_the_mock_model_as_a_command_runs_it() -> None:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_mock_model(tokens=7, errors_every=2, ready=ready.set_result))
    url = await asyncio.wait_for(ready, 20)
    async with aiohttp.ClientSession(headers=KEYS) as session:
        body = body_for(ANTHROPIC, model="any-model-at-all", stream=True)
        async with session.post(url + ANTHROPIC, json=body) as response:
            assert response.status == 200
            deltas = [e for e in events(await response.text()) if e["type"] == "content_block_delta"]
        async with session.post(url + ANTHROPIC, json=body) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "0")
        async with session.post(url + ANTHROPIC, json=body_for(ANTHROPIC, text="")) as response:
            assert response.status == 400
    assert [event["delta"]["text"] for event in deltas] == [f"w{number:03d} " for number in range(7)]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_taken_port_is_an_error_and_leaves_nothing_open() -> None:
    async with ModelServer(fixed()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(OSError):
            await ModelServer(fixed(), port=port).start()
        assert (await send(server, CHAT, body_for(CHAT)))[0] == 200
