"""Whatever a client sends ends as 4xx with a code: never as 5xx, never as a hang, never with the value echoed."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from multidict import CIMultiDict
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


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "bearer {key}",
        "Bearer  {key}",
        "Basic {key}",
        "{key}",
        "Bearer {key}x",
        "Bearer {flipped}",
        "Bearer omnara_daemon_v1_0000000000000000000000000000000000000000000_49kVrl",
        "Bearer omnara_pat_v1_0000000000000000000000000000000000000000000_3ovNGW",
        "Bearer omnara_pat_v2_0000000000000000000000000000000000000000000_3ovNGW",
        "Bearer \u00fc",
    ],
)
async def test_credentials(server: ApiServer, agent: str, header: str | None) -> None:
    flipped = server.key[:-1] + ("0" if server.key[-1] != "0" else "1")
    headers = {} if header is None else {"Authorization": header.format(key=server.key, flipped=flipped)}
    # An invalid body without a key is still a 401: who is calling comes first.
    answer = await server.call("POST", f"{agent}/inputs?x=1", b"nonsense", key=None, headers=headers)
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert server.key not in answer.text


async def test_two_credentials_are_none(server: ApiServer, agent: str) -> None:

    headers = CIMultiDict([("Authorization", f"Bearer {server.key}"), ("Authorization", f"Bearer {server.key}")])
    async with server.session.get(server.url + agent, headers=headers) as response:
        assert response.status == 401


async def test_what_may_not_be_seen_is_not_found_and_what_may_not_be_done_is_forbidden(
    server: ApiServer, agent: str
) -> None:
    stranger, viewer = await server.user(None), await server.user("viewer")
    config = await server.config()
    body = {"content_blocks": [{"type": "text", "text": "x"}]}
    operations: list[tuple[str, str, Any]] = [
        ("POST", f"{agent}/inputs", body),
        ("POST", f"{agent}/cancel", None),
        ("POST", f"{agent}/archive", None),
        ("POST", f"{server.scope}/agents", {"config": config}),
        ("POST", f"{server.scope}/agent-configs", {"source": "x", "source_format": "yaml"}),
        ("POST", f"/agents/{agent.rsplit('/', 1)[1]}/pause", None),
    ]
    for method, path, payload in operations:
        seen = await server.call(method, path, payload, key=viewer)
        assert (seen.status, seen.code) == (403, "forbidden"), path
        unseen = await server.call(method, path, payload, key=stranger)
        assert (unseen.status, unseen.code) == (404, "not_found"), path
    assert (await server.call("GET", agent, key=viewer)).status == 200
    for path in (agent, f"{agent}/events", f"{agent}/events/stream", f"{server.scope}/agents"):
        assert (await server.call("GET", path, key=stranger)).status == 404, path


async def test_another_organizations_path_does_not_lead_to_the_agent(server: ApiServer, agent: str) -> None:
    agent_id = agent.rsplit("/", 1)[1]
    for org, project in (
        (encode(IdKind.ORG, new_uuid()), server.project),
        (server.org, encode(IdKind.PROJECT, new_uuid())),
    ):
        answer = await server.call("GET", f"/api/v1/orgs/{org}/projects/{project}/agents/{agent_id}")
        assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.parametrize("key", ["", "k" * 256, "a\tb", "\u00fc" * 256])
async def test_bad_idempotency_keys(server: ApiServer, agent: str, key: str) -> None:
    answer = await server.call("POST", f"{agent}/inputs", text(b"a"), headers={"Idempotency-Key": key})
    assert (answer.status, answer.code) == (400, "validation_failed")


@pytest.mark.parametrize("key", ["k", "k" * 255, "\u00fc-\U0001f600", "a b"])
async def test_good_idempotency_keys(server: ApiServer, agent: str, key: str) -> None:
    for status in (201, 200):
        answer = await server.call("POST", f"{agent}/inputs", text(b"a"), headers={"Idempotency-Key": key})
        assert answer.status == status, answer.text


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
async def test_other_media_types(server: ApiServer, agent: str, kind: str) -> None:
    answer = await server.call("POST", f"{agent}/inputs", text(b"a"), headers={"Content-Type": kind})
    assert (answer.status, answer.code) == (415, "unsupported_media_type")
    fine = await server.call(
        "POST", f"{agent}/inputs", text(b"a"), headers={"Content-Type": "application/json; charset=UTF-8"}
    )
    assert fine.status == 201


# --- sizes ------------------------------------------------------------------------------------------------


async def test_too_large_bodies_are_413_also_when_their_size_is_not_announced(server: ApiServer, agent: str) -> None:
    big = b'{"source":"' + b"x" * 1_100_000 + b'","source_format":"yaml"}'
    path = f"{server.scope}/agent-configs"
    assert (await server.call("POST", path, big)).code == "request_too_large"
    assert (await server.call("POST", path, big, key=None)).status == 413, "size comes before who is calling"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(big), 65_536):
            yield big[start : start + 65_536]

    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    async with server.session.post(server.url + path, data=pieces(), headers=headers) as response:
        assert response.status == 413
    zipped = gzip.compress(b'{"source":"' + b"x" * 30_000_000 + b'"}')
    assert len(zipped) < 100_000
    async with server.session.post(
        server.url + path, data=zipped, headers=headers | {"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 413


async def test_inputs_may_be_large(server: ApiServer, agent: str) -> None:
    body = b'{"content_blocks":[{"type":"media","media_type":"image/png","data":"' + b"A" * 5_000_000 + b'"}]}'
    answer = await server.call("POST", f"{agent}/inputs", body)
    assert (answer.status, answer.code) == (422, "unprocessable"), "read and understood, not refused for its size"


async def raw_request(server: ApiServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(65_536), 5)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /agents HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /agents HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_bytes_that_are_no_request_get_an_error_body(server: ApiServer, data: bytes) -> None:
    answer = await raw_request(server, data)
    assert b" 400 " in answer.split(b"\r\n", 1)[0]
    body = msgspec.json.decode(answer.split(b"\r\n\r\n", 1)[1])
    assert body["code"] == "invalid_request"


async def test_a_body_cut_short_is_no_failure_of_the_server(server: ApiServer, agent: str) -> None:
    head = (
        f"POST {agent}/inputs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(head.encode())
    await writer.drain()
    writer.close()
    assert (await server.get(agent))["agent"]["state"] == "active"
    bad = f"{head.split('Content-Length')[0]}Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    answer = await raw_request(server, bad.encode())
    assert b" 400 " in answer.split(b"\r\n", 1)[0]
