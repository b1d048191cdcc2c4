"""Whatever a client sends ends as 4xx with a code: never as 5xx, never as a hang, never with the value echoed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from yarl import URL

from omnara.ids import IdKind, encode, new_uuid
from tests.contract.server import ApiServer, api_server
from tests.support.postgres import PostgresForTests

SECRET = "do-not-echo-me"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def agent(server: ApiServer) -> str:
    return await server.agent()


def text(value: bytes) -> bytes:
    return b'{"content_blocks":[{"type":"text","text":"' + value + b'"}]}'


BODIES: dict[str, bytes] = {
    "empty object": b"{}",
    "not json": b"hello",
    "array": b"[]",
    "null": b"null",
    "string": b'"x"',
    "truncated": b'{"content_blocks":[',
    "second value": text(b"a") + b" {}",
    "trailing garbage": text(b"a") + b"x",
    "byte order mark": b"\xef\xbb\xbf" + text(b"a"),
    "utf-16": text(b"a").decode().encode("utf-16"),
    "bad utf-8": text(b"\xff\xfe"),
    "overlong utf-8": text(b"\xc0\x80"),
    "utf-8 surrogate": text(b"\xed\xa0\x80"),
    "raw nul": text(b"a\x00b"),
    "raw newline": text(b"a\nb"),
    "unknown field": b'{"content_blocks":[],"do-not-echo-me":1}',
    "unknown nested field": b'{"content_blocks":[{"type":"text","text":"a","do-not-echo-me":1}]}',
    "wrong type": b'{"content_blocks":"do-not-echo-me"}',
    "wrong enum": b'{"content_blocks":[],"delivery_mode":"do-not-echo-me"}',
    "wrong tag": b'{"content_blocks":[{"type":"do-not-echo-me"}]}',
    "no tag": b'{"content_blocks":[{"text":"do-not-echo-me"}]}',
    "null for absent": b'{"content_blocks":[],"delivery_mode":null}',
    "number for text": b'{"content_blocks":[{"type":"text","text":5}]}',
    "huge exponent": b'{"content_blocks":[{"type":"text","text":1e400}]}',
    "huge integer": b'{"content_blocks":[{"type":"text","text":' + b"9" * 5000 + b"}]}",
    "nan": b'{"content_blocks":NaN}',
    "single quotes": b"{'content_blocks':[]}",
    "comment": b'{"content_blocks":[]/**/}',
    "deep": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "metadata too many": msgspec.json.encode(
        {"content_blocks": [{"type": "text", "text": "a", "metadata": {str(n): "v" for n in range(17)}}]}
    ),
    "metadata key too long": msgspec.json.encode(
        {"content_blocks": [{"type": "text", "text": "a", "metadata": {"k" * 65: "v"}}]}
    ),
    "metadata value too long": msgspec.json.encode(
        {"content_blocks": [{"type": "text", "text": "a", "metadata": {"k": "v" * 513}}]}
    ),
    "metadata value no text": b'{"content_blocks":[{"type":"text","text":"a","metadata":{"k":1}}]}',
    "bad escape": text(b"\\x"),
    "short escape": text(b"\\u12"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_bad_bodies(server: ApiServer, agent: str, name: str) -> None:
    answer = await server.call("POST", f"{agent}/inputs", BODIES[name])
    assert (answer.status, answer.code) == (400, "validation_failed"), answer.text
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (b"a\\u0000b", "a\ufffdb"),
        (b"\\ud800", "\ufffd"),
        (b"x\\udfffy", "x\ufffdy"),
        (b"\\ud83d\\ude00", "\U0001f600"),
        (b"\\ud83d", "\ufffd"),
        (b"\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        (b"\\\\ud800", "\\ud800"),
        (b"\\\\u0000", "\\u0000"),
        ("\u00e9\U0001f600".encode(), "\u00e9\U0001f600"),
    ],
)
async def test_what_postgres_and_providers_refuse_is_cleaned(
    server: ApiServer, agent: str, sent: bytes, stored: str
) -> None:
    answer = await server.call("POST", f"{agent}/inputs", text(sent))
    assert answer.status == 201, answer.text
    assert answer.json["agent_input"]["content_blocks"][0]["text"] == stored


async def test_deep_and_odd_tool_results(server: ApiServer, agent: str) -> None:
    path = f"{agent}/tool-calls/{encode(IdKind.TOOL_CALL, new_uuid())}/result"

    def body(value: bytes) -> bytes:
        return b'{"outcome":"succeeded","content_blocks":[{"type":"structured_data","value":' + value + b"}]}"

    for value in (b"[" * 101 + b"]" * 101, b"[" * 900 + b"]" * 900, b"[" * 90_000 + b"]" * 90_000, b"1e999"):
        answer = await server.call("POST", path, body(value))
        assert (answer.status, answer.code) == (400, "validation_failed"), value[:20]
    assert (await server.call("POST", path, body(b"[" * 90 + b"]" * 90))).status == 404
    assert (await server.call("POST", path, body(b"1180591620717411303424"))).status == 404


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "limit=-1",
        "limit=abc",
        "limit=",
        "limit=1e1",
        "limit=1.0",
        "limit=%2B5",
        "limit=5&limit=6",
        "limit=1180591620717411303424",
        "limit=1e400",
        "after_sequence=9223372036854775808",
        "after_sequence=-1",
        "before_sequence=%00",
        "before_sequence=true",
        "undeclared=do-not-echo-me",
        "=1",
        "after_sequence",
        "limit=%D9%A3",
    ],
)
async def test_bad_queries(server: ApiServer, agent: str, query: str) -> None:
    answer = await server.call("GET", f"{agent}/events?{query}")
    assert (answer.status, answer.code) == (400, "validation_failed"), answer.text
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("name=", "validation_failed"),
        ("name=" + "x" * 201, "validation_failed"),
        ("name=%00", "validation_failed"),
        ("name=***", "invalid_request"),
        ("name=a%5C", "invalid_request"),
        ("sort=size", "validation_failed"),
        ("agent_profile_id=aprf_x", "validation_failed"),
        ("cursor=" + "a" * 1025, "validation_failed"),
        ("cursor=%C3%BC", "invalid_request"),
        ("limit=101", "validation_failed"),
    ],
)
async def test_bad_list_queries(server: ApiServer, query: str, code: str) -> None:
    answer = await server.call("GET", f"{server.scope}/agents?{query}")
    assert (answer.status, answer.code) == (400, code), answer.text


async def test_queries_where_none_are_declared(server: ApiServer, agent: str) -> None:
    for method, path in (("GET", agent), ("GET", "/api/v1/me"), ("POST", f"{agent}/archive"), ("POST", "/agents")):
        answer = await server.call(method, f"{path}?x=1")
        assert (answer.status, answer.code) == (400, "validation_failed"), path


async def test_bodies_where_none_are_declared(server: ApiServer, agent: str) -> None:
    for method, path in (("GET", agent), ("POST", f"{agent}/archive"), ("POST", f"/agents/{agent[-30:]}/pause")):
        for body in (b"{}", b" ", b"null"):
            answer = await server.call(method, path, body)
            assert (answer.status, answer.code) == (400, "validation_failed"), (path, body)
    assert (await server.get(agent))["agent"]["state"] == "active"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/", 404),
        ("GET", "/readyz", 404),
        ("GET", "/metrics", 404),
        ("GET", "/api/v1/nope", 404),
        ("GET", "{agent}/", 404),
        ("GET", "{scope}//agents", 404),
        ("PUT", "{agent}", 404),
        ("PATCH", "{agent}", 404),
        ("OPTIONS", "{agent}", 404),
        ("DELETE", "{agent}/events", 404),
        ("POST", "/api/v1/me", 404),
        ("PROPFIND", "{agent}", 404),
        ("GET", "{scope}/agents/a%2Fb", 404),
        ("GET", "{scope}%2Fagents", 404),
        ("GET", "{scope}/agents/agt_x", 400),
        ("GET", "{scope}/agents/%00", 400),
        ("GET", "{scope}/agents/..%5c", 400),
        ("GET", "{scope}/agents/" + "a" * 5000, 400),
        ("GET", "/agents/acfg_agktlwj56547xndg7kih7il7ty", 400),
        ("GET", "/agents/AGT_agktlwj56547xndg7kih7il7ty", 400),
        ("GET", "/agents/agt_agktlwj56547xndg7kih7il7tz", 400),
        ("GET", "/agents/agt_aaaaaaaaaaaaaaaaaaaaaaaaaa", 400),
        ("GET", "/agents/agt_agktlwj56547xndg7kih7il7ty", 404),
    ],
)
async def test_paths_and_methods(server: ApiServer, agent: str, method: str, path: str, status: int) -> None:

    url = URL(server.url + path.format(agent=agent, scope=server.scope), encoded=True)
    headers = {"Authorization": f"Bearer {server.key}"}
    async with server.session.request(method, url, headers=headers) as response:
        body = msgspec.json.decode(await response.read())
    assert (response.status, body["code"]) == (status, "not_found" if status == 404 else "validation_failed")


async def test_head_is_not_found(server: ApiServer, agent: str) -> None:
    for path in (agent, "/healthz", "/api/openapi.yaml", f"{agent}/events/stream"):
        async with server.session.head(
            server.url + path, headers={"Authorization": f"Bearer {server.key}"}
        ) as response:
            assert response.status == 404, path
