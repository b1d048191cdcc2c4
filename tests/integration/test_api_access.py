"""Who may call, what it may see, and requests that are too large or no HTTP at all."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from multidict import CIMultiDict

from omnara.ids import IdKind, encode, new_uuid
from tests.contract.server import ApiServer, api_server
from tests.support.postgres import PostgresForTests


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"})) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def agent(server: ApiServer) -> str:
    return await server.agent()


def text(value: bytes) -> bytes:
    return b'{"content_blocks":[{"type":"text","text":"' + value + b'"}]}'


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


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "identity, gzip", "nonsense"])
async def test_nothing_is_unpacked(server: ApiServer, agent: str, encoding: str) -> None:
    """A small body may hold a gigabyte, and what it holds may be no such thing; either way it is only bytes here."""
    packed = gzip.compress(b'{"content_blocks":[]}')
    for key, status in ((server.key, 415), (None, 401)):
        for data in (packed, b"no such thing"):
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            if key is not None:
                headers["Authorization"] = f"Bearer {key}"
            async with server.session.post(f"{server.url}{agent}/inputs", data=data, headers=headers) as response:
                assert response.status == status
                assert response.headers.get("Connection") != "close"


async def test_inputs_may_be_large(server: ApiServer, agent: str) -> None:
    body = b'{"content_blocks":[{"type":"media","media_type":"image/png","data":"' + b"A" * 5_000_000 + b'"}]}'
    answer = await server.call("POST", f"{agent}/inputs", body)
    assert (answer.status, answer.code) == (400, "invalid_request"), "read and understood, not refused for its size"


async def raw_request(server: ApiServer, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(65_536), 20)
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
