"""Event streams over HTTP: whole, in order, resumable, bounded, and ended when they should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.ids import IdKind, decode, encode, new_uuid
from omnara.testing import ModelServer, call, embed, embedded, say
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.contract.stream_client import Frame, open_stream
from tests.support.postgres import PostgresForTests

TOOL = CONFIG + "tools: {look: {type: custom, description: L, input_schema: {type: object, properties: {}}}}\n"
DELTAS = "?stream_deltas=true"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[ApiServer]:
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, model, stream_sweep_s=0.3, stream_heartbeat_s=0.4) as running,
    ):
        yield running


def durable(frames: list[Frame]) -> list[int]:
    return [int(frame.id) for frame in frames if frame.id is not None]


# --- content ----------------------------------------------------------------------------------------------


async def test_a_conversation_arrives_once_and_in_order(server: ApiServer) -> None:
    agent = await server.agent(source=TOOL)
    async with open_stream(server, agent) as stream:
        assert stream.response.headers["Content-Type"] == "text/event-stream"
        assert stream.response.headers["X-Accel-Buffering"] == "no"
        assert "no-cache" in stream.response.headers["Cache-Control"]
        assert stream.response.headers["X-Request-Id"]
        await server.say(agent, embed(call("look", {}), say("done")))
        await server.settled(agent, "waiting")
        (waiting,) = (await server.get(f"{agent}/tool-calls"))["data"]
        body = {"outcome": "succeeded", "content_blocks": []}
        await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
        assert await stream.events(5) == [1, 2, 3, 4, 5]
    stored = (await server.get(f"{agent}/events"))["data"]
    async with open_stream(server, agent) as stream:
        assert [frame.data for frame in await stream.told(5)] == stored


async def test_live_and_stored_frames_are_the_same(server: ApiServer) -> None:
    agent = await server.agent()
    async with open_stream(server, agent) as stream:
        await server.say(agent, "hello")
        live = [frame for frame in await stream.until("model_output") if frame.id is not None]
    async with open_stream(server, agent) as stream:
        stored = await stream.told(len(live))
    assert live == stored


async def test_deltas_come_before_their_output_and_only_when_asked(server: ApiServer) -> None:
    agent = await server.agent()
    async with open_stream(server, agent, DELTAS) as keen, open_stream(server, agent) as plain:
        await server.say(agent, embed(say("one two three four five six seven eight")))
        frames = await keen.until("model_output")
        quiet = await plain.until("model_output")
    deltas = [frame.data for frame in frames if frame.event == "model_output_delta"]
    assert not [frame for frame in quiet if frame.event == "model_output_delta"]
    assert "".join(delta["event"].get("delta", "") for delta in deltas) == "one two three four five six seven eight"
    assert [delta["seq"] for delta in deltas] == list(range(1, len(deltas) + 1))
    ends = [0] + [delta["source_seq_end"] for delta in deltas]
    assert [delta["source_seq_start"] for delta in deltas] == [end + 1 for end in ends[:-1]]
    assert frames[-1].data["model_call_context_id"] == deltas[0]["model_call_context_id"]
    assert {"block_start", "text_delta", "block_stop", "message_stop"} <= {delta["event"]["kind"] for delta in deltas}


async def test_deltas_of_a_tool_call_name_the_later_call(server: ApiServer) -> None:
    agent = await server.agent(source=TOOL)
    async with open_stream(server, agent, DELTAS) as stream:
        await server.say(agent, embed(call("look", {}), say("x")))
        frames = await stream.until("model_output")
    starts = [
        f.data["event"]["block"] for f in frames if f.event == "model_output_delta" and "block" in f.data["event"]
    ]
    named = [block["tool_call_id"] for block in starts if block["kind"] == "tool_use"]
    assert named == [b["tool_call_id"] for b in frames[-1].data["content_blocks"] if b["type"] == "tool_call"]


async def test_tool_call_updates_arrive(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {}), say("x")), source=TOOL)
    await server.settled(agent, "waiting")
    (waiting,) = (await server.get(f"{agent}/tool-calls"))["data"]
    async with open_stream(server, agent, "?after_sequence=3") as stream:
        body = {"outcome": "succeeded", "content_blocks": []}
        await server.call("POST", f"{agent}/tool-calls/{waiting['id']}/result", body)
        frames = await stream.until("tool_call_update")
    assert frames[-1].data == {"tool_call_id": waiting["id"], "state": "completed"}


# --- places -----------------------------------------------------------------------------------------------


async def long_log(server: ApiServer, length: int = 250) -> str:
    """An agent with that many events, written by the database."""
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
    await append(server, agent_id, length - 1)
    return agent


async def append(server: ApiServer, agent_id: Any, count: int) -> None:
    """Append events behind the server's back, as a replica whose hints were all lost."""
    await server.rows(
        """with h as (update agent_sched set next_sequence = next_sequence + $2 where agent_id = $1
                      returning next_sequence - $2 as first, turn_id, turn_sequence)
           insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, payload)
           select $1, h.first + n, gen_random_uuid(), 'tool_result', h.turn_id, h.turn_sequence,
                  ('{"tool_call_id":"tcl_' || repeat('a', 26) || '","outcome":"succeeded","content_blocks":[]}')::json
           from h, generate_series(0, $2 - 1) n""",
        agent_id,
        count,
    )


@pytest.mark.parametrize(
    ("query", "header", "first"),
    [
        ("", None, 1),
        ("?after_sequence=0", None, 1),
        ("?after_sequence=9", None, 10),
        ("?after_sequence=200", None, 201),
        ("", "9", 10),
        ("", "99", 100),
        ("?after_sequence=3", "100", 101),
        ("?after_sequence=100", "0", 1),
    ],
)
async def test_resuming(server: ApiServer, query: str, header: str | None, first: int) -> None:
    agent = await long_log(server)
    headers = {} if header is None else {"Last-Event-ID": header}
    async with open_stream(server, agent, query, headers=headers) as stream:
        assert await stream.events(251 - first) == list(range(first, 251))


@pytest.mark.parametrize(
    ("query", "header", "code"),
    [
        ("", "-1", "validation_failed"),
        ("", "abc", "validation_failed"),
        ("", "", "validation_failed"),
        ("", "1.5", "validation_failed"),
        ("", "9223372036854775808", "validation_failed"),
        ("", "2", "invalid_request"),
        ("?after_sequence=2", None, "invalid_request"),
        ("?after_sequence=-1", None, "validation_failed"),
        ("?stream_deltas=yes", None, "validation_failed"),
        ("?nonsense=1", None, "validation_failed"),
    ],
)
async def test_places_that_are_no_places(server: ApiServer, query: str, header: str | None, code: str) -> None:
    agent = await server.agent()
    headers = {} if header is None else {"Last-Event-ID": header}
    answer = await server.call("GET", f"{agent}/events/stream{query}", headers=headers)
    assert (answer.status, answer.code) == (400, code)


async def test_unknown_agent_and_missing_key(server: ApiServer) -> None:
    missing = f"{server.scope}/agents/{encode(IdKind.AGENT, new_uuid())}/events/stream"
    assert (await server.call("GET", missing)).status == 404
    assert (await server.call("GET", missing, key=None)).status == 401


async def test_the_sweep_finds_what_no_hint_announced(server: ApiServer) -> None:
    agent = await server.agent()
    async with open_stream(server, agent) as stream:
        assert await stream.events(1) == [1]
        await append(server, decode(IdKind.AGENT, agent.rsplit("/", 1)[1]), 150)
        assert await stream.events(150, within_s=20) == list(range(2, 152))


async def test_many_readers_join_while_events_are_written(server: ApiServer) -> None:
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])

    async def read(number: int) -> list[int]:
        await asyncio.sleep(number * 0.004)
        async with open_stream(server, agent) as stream:
            return await stream.events(101, within_s=20)

    readers = [asyncio.create_task(read(number)) for number in range(60)]
    for _ in range(20):
        await append(server, agent_id, 5)
        server.deps.feed.wake(agent_id)
        await asyncio.sleep(0.01)
    for found in await asyncio.gather(*readers):
        assert found == list(range(1, 102))
