"""The checker must be able to fail: answers are broken on purpose and have to be noticed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from omnara.api import openapi
from tests.contract.checker import EVENT_STREAM, Checker
from tests.contract.server import api_server

ME = "/api/v1/me"
CATALOG = "/api/v1/tool-catalog"
STREAM = "/api/v1/orgs/{orgID}/projects/{projectID}/agents/{agentID}/events/stream"
USER = {"user": {"id": "usr_" + "a" * 26, "email": "", "display_name": ""}, "orgs": []}
ORG = {"id": "org_" + "a" * 26, "name": "n", "role": "owner", "created_at": "2026-01-01T00:00:00Z"}


async def answers(path: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Checker:
    """Run a server with one route under the checker, ask it once, and return the checker."""
    app = web.Application()
    app.router.add_route("GET", path, handler)
    checker = Checker()
    checker.install(app)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}" + path.format(orgID="o", projectID="p", agentID="a")
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            await response.read()
    finally:
        await runner.cleanup()
    return checker


@pytest.mark.parametrize(
    ("status", "body", "wrong"),
    [
        (200, USER, ""),
        (200, USER | {"orgs": [ORG]}, ""),
        (200, USER | {"more": 1}, "more"),
        (200, {"user": USER["user"]}, "orgs"),
        (200, USER | {"orgs": None}, "orgs"),
        (200, USER | {"orgs": [ORG | {"created_at": "2026-01-01T00:00:00"}]}, "created_at"),
        (200, USER | {"orgs": [ORG | {"id": "org_A"}]}, "id"),
        (201, USER, "status"),
        (404, {"error": "x", "code": "not_found"}, ""),
        (404, {"error": "x", "code": "no_such_code"}, "code"),
        (404, {"error": "x"}, "code"),
        (413, {"error": "x", "code": "internal_error"}, "code"),
        (418, {"error": "x", "code": "not_found"}, "does not name the status"),
        (500, {"error": "x", "code": "internal_error"}, ""),
        (500, {"error": "x", "code": "not_found"}, "code"),
    ],
)
async def test_bodies(status: int, body: Any, wrong: str) -> None:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")

    checker = await answers(ME, handler)
    assert checker.checked == 1
    assert bool(checker.violations) == bool(wrong), checker.violations
    assert all(wrong in violation for violation in checker.violations)


async def test_content_type_and_undeclared_routes() -> None:
    async def plain(_request: web.Request) -> web.Response:
        return web.Response(text="{}")

    assert "content type" in (await answers(CATALOG, plain)).violations[0]
    assert "undeclared route" in (await answers("/api/v1/surprise", plain)).violations[0]


UPDATE = '{"tool_call_id":"tcl_' + "a" * 26 + '","state":"ready"}'


@pytest.mark.parametrize(
    ("frame", "wrong"),
    [
        (": ok", False),
        (": heartbeat", False),
        (": other", True),
        (f"event: tool_call_update\ndata: {UPDATE}", False),
        (f"id: 1\nevent: tool_call_update\ndata: {UPDATE}", True),
        (f"data: {UPDATE}\nevent: tool_call_update", True),
        ('event: tool_call_update\ndata: {"state":"ready"}', True),
        (f"event: surprise\ndata: {UPDATE}", True),
        ("retry: 5", True),
        ('event: error\ndata: {"error":"x","code":"internal_error"}', False),
        ('event: error\ndata: {"error":"x","code":"nope"}', True),
        ('id: 1\nevent: model_output\ndata: {"event_kind":"model_output"}', True),
    ],
)
async def test_frames(frame: str, wrong: bool) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        await response.prepare(request)
        data = frame.encode() + b"\n\n"
        await response.write(data[:5])
        await response.write(data[5:])
        return response

    checker = await answers(STREAM, stream)
    assert checker.frames == 1
    assert bool(checker.violations) is wrong, checker.violations


async def test_a_broken_answer_fails_the_test_that_runs_the_server(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole chain: a real server whose answer is spoiled makes the fixture's end fail."""

    async def spoiled(_call: Any) -> web.Response:
        return web.json_response({"built_in_tools": []})

    routes = [
        msgspec.structs.replace(route, handler=spoiled) if route.path == CATALOG else route for route in openapi.ROUTES
    ]
    monkeypatch.setattr("omnara.api.openapi.ROUTES", tuple(routes))
    with pytest.raises(AssertionError, match="custom_tool_permissions"):
        async with api_server(database, roles=frozenset({"api"})) as server:
            assert (await server.call("GET", CATALOG)).status == 200
