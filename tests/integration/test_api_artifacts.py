"""Files over HTTP: sent inside messages, shown as references, fetched whole and in parts by whoever may."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, encode, new_uuid
from omnara.testing import ModelServer, call, embed, embedded, say
from tests.contract.server import ApiServer, api_server, model_server
from tests.support.pictures import PDF, block, png
from tests.support.postgres import PostgresForTests

BIG = png(1000, 700, padding=1_300_000)
"""Three chunks."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def sent(server: ApiServer, agent: str, *blocks: Any) -> list[str]:
    """Send a message of these blocks; return the paths of its files."""
    answer = await server.call("POST", f"{agent}/inputs", {"content_blocks": list(blocks)})
    assert answer.status == 201, answer.text
    shown = answer.json["agent_input"]["content_blocks"]
    return [f"{agent}/artifacts/{block['artifact_id']}" for block in shown if block["type"] == "media_ref"]


async def fetched(server: ApiServer, path: str, **headers: str) -> tuple[int, Any, bytes]:
    """GET bytes."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    auth = {"Authorization": f"Bearer {server.key}"}
    async with server.session.get(server.url + path, headers={**auth, **headers}) as response:
        return response.status, response.headers, await response.read()


async def test_a_file_is_described_and_served(server: ApiServer) -> None:
    agent = await server.agent()
    [path] = await sent(server, agent, block(BIG, filename='a "b"/<ü>.png'), {"type": "text", "text": "see"})
    digest = "sha256:" + hashlib.sha256(BIG).hexdigest()
    about = await server.get(path)
    assert (about["content_type"], about["size_bytes"], about["digest"]) == ("image/png", len(BIG), digest)
    assert about["filename"] == 'a "b"/<ü>.png'
    assert path.endswith(about["id"])
    status, headers, content = await fetched(server, f"{path}/content")
    assert (status, content == BIG) == (200, True)
    assert headers["Content-Type"] == "image/png"
    assert headers["Content-Length"] == str(len(BIG))
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Disposition"] == 'attachment; filename="a b.png"'
    assert headers["ETag"] == f'"{digest}"'
    assert headers["Cache-Control"] == "private, max-age=31536000, immutable"
    assert headers["X-Request-Id"]


async def test_text_is_served_as_it_came(server: ApiServer) -> None:
    agent = await server.agent()
    html = b"<script>alert(1)</script>"
    [path] = await sent(server, agent, block(html, "text/plain", filename="../../x\u202e"))
    _, headers, content = await fetched(server, f"{path}/content")
    assert content == html
    assert headers["Content-Type"] == "text/plain"
    assert headers["Content-Disposition"] == 'attachment; filename="....x"'


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, len(BIG)),
        ("bytes=-7", len(BIG) - 7, len(BIG)),
        ("bytes=524287-524288", 524287, 524289),
        ("bytes=500000-1200000", 500000, 1200001),
        ("bytes=10-999999999", 10, len(BIG)),
    ],
)
async def test_a_span_is_served(server: ApiServer, asked: str, start: int, stop: int) -> None:
    agent = await server.agent()
    [path] = await sent(server, agent, block(BIG))
    status, headers, content = await fetched(server, f"{path}/content", Range=asked)
    assert status == 206
    assert content == BIG[start:stop]
    assert headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(BIG)}"
    assert headers["Content-Length"] == str(stop - start)


async def test_conditions(server: ApiServer) -> None:
    agent = await server.agent()
    [path] = await sent(server, agent, block(PDF, "application/pdf"))
    path += "/content"
    _, headers, _ = await fetched(server, path)
    tag = headers["ETag"]
    status, headers, content = await fetched(server, path, If_None_Match=tag)
    assert (status, content, headers["ETag"]) == (304, b"", tag)
    assert (await fetched(server, path, If_None_Match='"other"'))[0] == 200
    assert (await fetched(server, path, Range="bytes=0-3", If_Range=tag))[2] == b"%PDF"
    assert (await fetched(server, path, Range="bytes=0-3", If_Range='"other"'))[2] == PDF
    assert (await fetched(server, path, Range="bytes=0-1,4-5"))[2] == PDF
    status, headers, _ = await fetched(server, path, Range=f"bytes={len(PDF)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(PDF)}")
    assert headers["Content-Type"].startswith("application/json")


async def test_only_readers_of_the_agent_see_its_files(server: ApiServer) -> None:
    agent, other = await server.agent(), await server.agent()
    [path] = await sent(server, agent, block(png()))
    viewer, stranger = await server.user("viewer"), await server.user(None)
    unknown = f"{agent}/artifacts/{encode(IdKind.ARTIFACT, new_uuid())}"
    for suffix in ("", "/content"):
        assert (await server.call("GET", path + suffix, key=None)).status == 401
        assert (await server.call("GET", path.replace(agent, other) + suffix)).status == 404
        assert (await server.call("GET", path + suffix, key=stranger)).status == 404
        assert (await server.call("GET", unknown + suffix)).status == 404
        assert (await server.call("GET", f"{agent}/artifacts/art_x{suffix}")).code == "validation_failed"
        assert (await server.call("HEAD", path + suffix)).status == 404
    assert (await server.call("GET", path, key=viewer)).status == 200


async def test_viewers_store_nothing(server: ApiServer) -> None:
    agent = await server.agent()
    body = {"content_blocks": [block(png(123, 456))]}
    assert (await server.call("POST", f"{agent}/inputs", body, key=await server.user("viewer"))).status == 403
    assert not await server.rows("select from artifact_blobs where size = $1", len(png(123, 456)))


async def test_the_log_shows_references(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent()
    [path] = await sent(server, agent, {"type": "text", "text": embed(say("ok"))}, block(png()))
    await server.settled(agent)
    events = (await server.get(f"{agent}/events"))["data"]
    said = next(event for event in events if event.get("input_kind") == "content")
    assert said["content_blocks"][1:] == [{"type": "media_ref", "artifact_id": path.rsplit("/", 1)[1]}]


async def test_a_custom_result_brings_a_file(postgres: PostgresForTests) -> None:
    script = embed(call("look", {"path": "/a"}), say("seen"))
    source = (
        "instruction: Look.\nmodel:\n  provider_config: anthropic\n  name: claude-sonnet-4-6\n"
        "tools:\n  look:\n    type: custom\n    description: Looks.\n"
        "    input_schema: {type: object, properties: {path: {type: string}}}\n"
    )
    async with model_server(embedded) as model, postgres.fresh() as dsn, api_server(dsn, model) as server:
        agent = await server.agent(script, source=source)
        await server.settled(agent, "waiting")
        [waiting] = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
        body = {"outcome": "succeeded", "content_blocks": [block(png(), filename="s.png")]}
        answer = await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
        assert answer.status == 201, answer.text
        [shown] = answer.json["tool_result"]["content_blocks"]
        assert shown["type"] == "media_ref"
        assert (await fetched(server, f"{agent}/artifacts/{shown['artifact_id']}/content"))[2] == png()
        assert (await server.settled(agent))["output"] == "seen"
