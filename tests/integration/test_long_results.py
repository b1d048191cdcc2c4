"""Results that are too long for a conversation: kept in a file, previewed, and read on by the agent itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from omnara.domain.content import StructuredDataBlock, TextBlock
from omnara.testing import ModelServer, call, embed, embedded, say
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult, succeeded
from omnara.tools.registry import offered
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.support.pictures import block, png
from tests.support.postgres import PostgresForTests

LOOK = "tools:\n  look:\n    type: custom\n    description: Looks.\n    input_schema: {type: object}\n"
LONG = "\n".join(f"line {number} of a long result" for number in range(1, 4001))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, model) as running:
        yield running


async def answered(server: ApiServer, agent: str, *blocks: Any) -> Any:
    """Answer the waiting custom call; return the blocks of its stored result."""
    await server.settled(agent, "waiting")
    [waiting] = (await server.get(f"{agent}/tool-calls?state=ready"))["data"]
    body = {"outcome": "succeeded", "content_blocks": list(blocks)}
    answer = await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
    assert answer.status == 201, answer.text
    return answer.json["tool_result"]["content_blocks"]


def tools(model: ModelServer) -> list[str]:
    """The tools that the last request offered."""
    return [tool["name"] for tool in model.log.entries[-1].body.get("tools", [])]


async def results(server: ApiServer, agent: str) -> list[Any]:
    """The results in the log."""
    events = (await server.get(f"{agent}/events"))["data"]
    return [event for event in events if event["event_kind"] == "tool_result"]


async def test_a_long_result_is_a_file_with_a_preview(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent(embed(call("look", {}), say("seen")), source=CONFIG + LOOK)
    shown, file = await answered(server, agent, {"type": "text", "text": LONG})
    name = file["artifact_id"]
    assert file == {"type": "media_ref", "artifact_id": name, "metadata": {"omnara_overflow": "true"}}
    assert shown["text"].startswith("line 1 of a long result\n")
    assert f"The first 8192 of {len(LONG)} bytes are shown." in shown["text"]
    assert f"/artifacts/{name}" in shown["text"]
    assert len(shown["text"]) < 9000
    async with server.session.get(
        f"{server.url}{agent}/artifacts/{name}/content", headers={"Authorization": f"Bearer {server.key}"}
    ) as response:
        assert await response.text() == LONG
        assert response.headers["Content-Disposition"] == 'attachment; filename="look-result.txt"'
    assert (await server.settled(agent))["output"] == "seen"
    assert tools(model) == ["look", "read_file", "search_files"]
    assert len(model.log.entries[-1].raw) < 15_000


async def test_a_result_of_the_last_byte_that_fits_stays(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent(embed(call("look", {}), say("seen")), source=CONFIG + LOOK)
    text = "x" * (50 * 1024)
    assert await answered(server, agent, {"type": "text", "text": text}) == [{"type": "text", "text": text}]
    await server.settled(agent)
    assert tools(model) == ["look"]


async def test_long_data_and_pictures_beside_it(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {}), say("seen")), source=CONFIG + LOOK)
    data = {"type": "structured_data", "value": {"rows": ["x" * 100] * 1000}}
    shown, file, picture = await answered(server, agent, {"type": "text", "text": "rows:"}, data, block(png()))
    assert shown["text"].startswith('rows:\n{"rows":["xxx')
    assert "metadata" in file
    assert "metadata" not in picture
    assert (await server.settled(agent))["output"] == "seen"


async def test_the_agent_reads_on_and_searches(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent(
        embed(
            call("look", {}),
            call("search_files", {"pattern": "line 39[0-9]5 "}),
            call("read_file", {"path": "{{id}}", "start_line": 3905, "lines": 2}),
            say("seen"),
        ),
        source=CONFIG + LOOK,
    )
    await answered(server, agent, {"type": "text", "text": LONG})
    await server.settled(agent)
    _, searched, read = await results(server, agent)
    assert "3905: line 3905 of a long result" in searched["content_blocks"][0]["text"]
    assert searched["content_blocks"][1]["value"] == {"matches": 10, "files": 1, "complete": True}
    assert read["content_blocks"][0]["value"]["error_code"] == "file_not_found", "the script does not know the id"
    assert (await server.settled(agent))["output"] == "seen"


async def test_an_engine_run_tool_spills_too(server: ApiServer, model: ModelServer) -> None:
    async def run(call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
        assert ctx.files is not None, call
        return succeeded(TextBlock(LONG), StructuredDataBlock({"n": 1}))

    tool = Tool(name="flood", description="x", input_schema={"type": "object"}, type="built_in", effect=Effect.OUTSIDE)
    with offered(tool, run):
        agent = await server.agent(embed(call("flood", {}), say("seen")), source=CONFIG + "tools:\n  flood: {}\n")
        assert (await server.settled(agent))["output"] == "seen"
    [result] = await results(server, agent)
    assert [part["type"] for part in result["content_blocks"]] == ["text", "media_ref"]
    about = await server.get(f"{agent}/artifacts/{result['content_blocks'][1]['artifact_id']}")
    assert (about["filename"], about["size_bytes"]) == ("flood-result.txt", len(LONG) + len('\n{"n":1}'))


async def test_a_long_attachment_is_read_on_as_well(server: ApiServer, model: ModelServer) -> None:
    agent = await server.agent()
    text = {"type": "text", "text": embed(call("search_files", {"pattern": "line 4000"}), say("seen"))}
    body = {"content_blocks": [text, block(LONG.encode(), "text/plain", filename="log.txt")]}
    assert (await server.call("POST", f"{agent}/inputs", body)).status == 201
    assert (await server.settled(agent))["output"] == "seen"
    assert tools(model) == ["read_file", "search_files"]
    [searched] = await results(server, agent)
    assert searched["outcome"] == "succeeded"
    assert searched["content_blocks"][1]["value"]["matches"] == 1
