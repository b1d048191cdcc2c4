"""Web pages of other origins: nothing unless a setting names them, and then what they need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara import settings
from omnara.errors import ConfigurationError
from tests.contract.server import Answered, ApiServer, api_server
from tests.contract.stream_client import open_stream
from tests.support.postgres import PostgresForTests

PAGE = "https://app.example.com"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-own"}
PREFIX = "Access-Control-"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    origins = (PAGE, "http://localhost:3000")
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"}), cors_origins=origins) as running:
        yield running


def granted(answer: Any) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith(PREFIX)}


async def preflight(server: ApiServer, origin: str | None, **more: str) -> Answered:
    headers = {**ASKS, **({} if origin is None else {"Origin": origin}), **more}
    return await server.call("OPTIONS", f"{server.scope}/agents", key=None, headers=headers)


async def test_a_preflight_is_answered_without_a_key(server: ApiServer) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        answer = await preflight(server, origin)
        assert (answer.status, answer.text) == (204, "")
        assert granted(answer) == {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE",
            "Access-Control-Allow-Headers": "authorization,x-own",
            "Access-Control-Max-Age": "7200",
        }
        assert "Origin" in answer.headers["Vary"]
    plain = await preflight(server, PAGE, **{"Access-Control-Request-Headers": "nonsense here; x"})
    assert "Idempotency-Key" in granted(plain)["Access-Control-Allow-Headers"]


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "https://evil.example.com",
        PAGE + ".evil.com",
        PAGE.upper(),
        "http://app.example.com",
        PAGE + ":8443",
    ],
)
async def test_other_origins_get_nothing(server: ApiServer, origin: str | None) -> None:
    answer = await preflight(server, origin)
    assert (answer.status, answer.code) == (404, "not_found")
    assert granted(answer) == {}
    headers = {} if origin is None else {"Origin": origin}
    answer = await server.call("GET", f"{server.scope}/agents", headers=headers)
    assert answer.status == 200, "the server serves; it is the browser that does not hand it over"
    assert granted(answer) == {}
    assert "Origin" in answer.headers["Vary"], "a cache must not give this answer to an allowed page"


async def test_every_kind_of_answer_can_be_read(server: ApiServer) -> None:
    page = {"Origin": PAGE}
    agent = await server.agent()
    for answer in (
        await server.call("GET", f"{server.scope}/agents", headers=page),
        await server.call("GET", f"{server.scope}/agents", headers=page, key=None),
        await server.call("GET", f"{server.scope}/agents?limit=0", headers=page),
        await server.call("GET", "/nowhere", headers=page),
        await server.call("POST", f"{server.scope}/agents", b"{", headers=page),
    ):
        shown = granted(answer)
        assert shown["Access-Control-Allow-Origin"] == PAGE, answer.status
        assert {"X-Request-Id", "Retry-After", "ETag"} <= set(shown["Access-Control-Expose-Headers"].split(", "))
        assert "Access-Control-Allow-Credentials" not in shown
    for path in (agent, server.scope):
        async with open_stream(server, path, headers=page) as stream:
            assert granted(stream.response)["Access-Control-Allow-Origin"] == PAGE


async def test_options_that_ask_for_nothing_are_no_preflight(server: ApiServer) -> None:
    answer = await server.call("OPTIONS", f"{server.scope}/agents", headers={"Origin": PAGE})
    assert answer.status == 404


async def test_any_origin(postgres: PostgresForTests) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"}), cors_origins=("*",)) as server:
        for origin in (PAGE, "null", "https://anything.example"):
            assert granted(await preflight(server, origin))["Access-Control-Allow-Origin"] == "*"
            answer = await server.call("GET", f"{server.scope}/agents", headers={"Origin": origin})
            assert granted(answer)["Access-Control-Allow-Origin"] == "*"
            assert "Vary" not in answer.headers
        assert granted(await server.call("GET", f"{server.scope}/agents")) == {}


async def test_off_by_default(postgres: PostgresForTests) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as server:
        answer = await preflight(server, PAGE)
        assert (answer.status, granted(answer), "Vary" in answer.headers) == (404, {}, False)
        answer = await server.call("GET", f"{server.scope}/agents", headers={"Origin": PAGE})
        assert (answer.status, granted(answer), "Vary" in answer.headers) == (200, {}, False)


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example/",
        "https://A.example",
        "a.example",
        "https://a.example:443",
        "http://a:80",
        "*,https://a.b",
        "null",
    ],
)
def test_origins_that_no_browser_sends_stop_the_start(text: str) -> None:
    with pytest.raises(ConfigurationError, match="OMNARA_CORS_ORIGINS"):
        settings.load({"OMNARA_CORS_ORIGINS": text})


def test_origins_as_browsers_send_them() -> None:
    text = "https://a.example, http://localhost:3000,http://[::1]:5173,chrome-extension://abcdef"
    assert settings.load({"OMNARA_CORS_ORIGINS": text}).cors_origins == tuple(text.replace(" ", "").split(","))
    assert settings.load({"OMNARA_CORS_ORIGINS": "*"}).cors_origins == ("*",)
    assert settings.load({}).cors_origins == ()
