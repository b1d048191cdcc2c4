"""How event streams end and what they cost: heartbeats, archive, revoked keys, clients that leave, shutdown, sweeps."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.api import sse, streams
from omnara.clock import Deadline
from omnara.ids import IdKind, decode
from omnara.testing import Answer, ModelServer, Text, Timing, call, embed, embedded
from tests.contract.server import CONFIG, ApiServer, api_server, model_server
from tests.contract.stream_client import Frame, open_stream
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

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


# --- ends -------------------------------------------------------------------------------------------------


async def test_heartbeats_keep_an_idle_stream_alive(server: ApiServer) -> None:
    agent = await server.agent()
    async with open_stream(server, agent, "?after_sequence=1") as stream:
        for _ in range(3):
            frame = await stream.next(within_s=20)
            assert frame is not None
            assert frame.comment == "heartbeat"


async def test_archive_ends_a_stream_after_its_last_event(server: ApiServer) -> None:
    agent = await server.agent(embed(call("look", {})), source=TOOL)
    await server.settled(agent, "waiting")
    async with open_stream(server, agent) as stream:
        assert await stream.events(3) == [1, 2, 3]
        await server.call("POST", f"{agent}/archive")
        assert durable(await stream.rest(within_s=20)) == [4, 5]
    async with open_stream(server, agent, "?after_sequence=2") as stream:
        assert durable(await stream.rest(within_s=20)) == [3, 4, 5]


async def test_a_revoked_key_ends_its_streams_within_a_second(server: ApiServer) -> None:
    agent = await server.agent()
    key = await server.user("viewer")
    async with open_stream(server, agent, key=key) as stream, open_stream(server, agent) as other:
        assert await stream.events(1) == [1]
        await server.rows(
            "update personal_access_tokens set revoked_at = now() where user_id in "
            "(select user_id from project_members where role = 'viewer')"
        )
        assert await stream.rest(within_s=20.0) == []
        assert await other.events(1) == [1]

    async def refused() -> bool:
        return (await server.call("GET", agent, key=key)).status == 401

    await until(refused, "requests are refused", limit_s=20)


@pytest.mark.parametrize("told", [True, False])
async def test_a_crash_ends_a_stream_after_its_last_event_and_says_so(server: ApiServer, told: bool) -> None:
    """Nothing goes on until a person resumes the agent, so clients must not wait: `internal_error` makes them stop."""
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
    async with open_stream(server, agent) as stream:
        assert await stream.events(1) == [1]
        await append(server, agent_id, 2)
        await server.rows("update agent_sched set gate = 'crashed', ready_at = null where agent_id = $1", agent_id)
        if told:
            server.deps.feed.wake(agent_id)
        *events, last = await stream.rest(within_s=20)
        assert durable(events) == [2, 3]
        assert (last.event, last.id, last.data["code"]) == ("error", None, "internal_error")
        assert "crashed" in last.data["error"]
    async with open_stream(server, agent, "?after_sequence=1") as stream:
        *events, last = await stream.rest(within_s=20)
        assert (durable(events), last.event) == ([2, 3], "error")
    flat = f"/agents/{agent.rsplit('/', 1)[1]}"
    assert (await server.call("POST", f"{flat}/resume", {"force": True})).status == 200
    async with open_stream(server, agent, "?after_sequence=3") as stream:
        await server.say(agent, "go on")
        assert (await stream.until("model_output"))[-1].data["stop_reason"] == "end_turn"


GONE_RIGHTS = {
    "the role in the project": "delete from project_members where user_id = $1",
    "the membership of the organization": "delete from org_members where user_id = $1",
    "the user": "update users set deleted_at = now() where id = $1",
}


@pytest.mark.parametrize("what", GONE_RIGHTS)
async def test_a_right_that_is_taken_away_ends_its_streams(server: ApiServer, what: str) -> None:
    agent = await server.agent()
    key = await server.user("viewer")
    [row] = await server.rows("select user_id from personal_access_tokens order by created_at desc, id desc limit 1")
    async with open_stream(server, agent, key=key) as stream, open_stream(server, server.scope, key=key) as joint:
        assert await stream.events(1) == [1]
        await server.rows(GONE_RIGHTS[what], row["user_id"])
        assert await stream.rest(within_s=20.0) == []
        assert [frame for frame in await joint.rest(within_s=20.0) if frame.event] == []


@pytest.mark.parametrize(
    "sql",
    [
        "update org_api_keys set revoked_at = now(), org_role = null where id = $1",
        "delete from org_api_key_projects where key_id = $1",
    ],
)
async def test_an_organization_key_that_lost_its_right_ends_its_streams(server: ApiServer, sql: str) -> None:
    agent = await server.agent()
    key = await server.org_key("viewer")
    [row] = await server.rows("select id from org_api_keys order by created_at desc, id desc limit 1")
    async with open_stream(server, agent, key=key) as stream:
        assert await stream.events(1) == [1]
        for _ in range(2):
            frame = await stream.next(within_s=20)
            assert frame is not None
            assert frame.comment == "heartbeat", "checks go by while nothing has changed"
        await append(server, decode(IdKind.AGENT, agent.rsplit("/", 1)[1]), 1)
        assert await stream.events(1) == [2]
        await server.rows(sql, row["id"])
        assert await stream.rest(within_s=20.0) == []


async def test_a_client_that_leaves_frees_everything_at_once(server: ApiServer) -> None:
    agent = await server.agent()
    await until(lambda: len(server.hub) == 0, "earlier streams are closed")
    before = len(asyncio.all_tasks())
    opened = [open_stream(server, agent) for _ in range(40)]
    for stream in opened:
        await stream.__aenter__()
    assert len(server.hub) == 40
    for stream in opened:
        await stream.__aexit__(None, None, None)
    await until(lambda: len(server.hub) == 0, "streams are closed", limit_s=20)
    assert server.deps.feed.local_agents() == {}
    await until(lambda: len(asyncio.all_tasks()) <= before, "tasks are gone", limit_s=20)


async def test_a_client_that_never_reads_is_cut_and_loses_nothing(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALL_S", 0.5)
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
    await until(lambda: len(server.hub) == 0, "earlier streams are closed")
    with socket.create_connection((server.host, server.port)) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET {agent}/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n\r\n"
        lazy.sendall(request.encode())
        await until(lambda: len(server.hub) == 1, "the stream is open")
        await append(server, agent_id, 20_000)
        server.deps.feed.wake(agent_id)
        await until(lambda: len(server.hub) == 0, "the stream was cut", limit_s=20)
    async with open_stream(server, agent, "?after_sequence=19990") as stream:
        assert await stream.events(11) == list(range(19991, 20002))


async def test_streams_end_within_a_second_at_shutdown_and_say_so(
    postgres: PostgresForTests, model: ModelServer
) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, model) as server:
        agent = await server.agent()
        async with open_stream(server, agent) as one, open_stream(server, agent, DELTAS) as two:
            assert await one.events(1) == await two.events(1) == [1]
            loop = asyncio.get_running_loop()
            started = loop.time()
            await server.hub.drain(Deadline(20))
            for stream in (one, two):
                (last,) = await stream.rest(within_s=20)
                assert (last.event, last.data["code"]) == ("error", "service_unavailable")
            assert loop.time() - started < 15
            refused = await server.call("GET", f"{agent}/events/stream")
            assert (refused.status, refused.code) == (503, "service_unavailable")
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await server.call("GET", agent)).status == 200, "other routes answer until the end"


async def test_a_replica_without_the_worker_shows_deltas_too(postgres: PostgresForTests, model: ModelServer) -> None:
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, model, roles=frozenset({"api", "worker"})) as worker,
        api_server(dsn, model, roles=frozenset({"api"})) as front,
    ):
        agent = await worker.agent()
        agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
        async with open_stream(front, agent, DELTAS) as stream:
            await until(lambda: worker.deps.feed.wants_deltas(agent_id), "the interest has travelled")
            text = "word " * 200
            # Slow enough that a hint overtakes the rest of the answer: previews of a finished answer are not shown.
            spoken = Answer(blocks=(Text(text),), timing=Timing(tokens=40, token_ms=25))
            frames: list[Frame] = []
            for _ in range(2):
                await worker.say(agent, embed(spoken))
                frames += await stream.until("model_output")
                deltas = [frame.data for frame in frames if frame.event == "model_output_delta"]
                if deltas:  # or the database stood still for as long as this answer took
                    break
    assert deltas
    assert durable(frames) in ([1, 2, 3], [1, 2, 3, 4, 5])
    shown = "".join(delta["event"].get("delta", "") for delta in deltas)
    assert text.startswith(shown) or shown in text
    assert [delta["seq"] for delta in deltas] == sorted(delta["seq"] for delta in deltas)


OTHER_ID = "update events set id = gen_random_uuid() where agent_id = $1 and sequence = $2"
"""As a failover that lost an event, in whose place another one came."""


def promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the database is in another timeline."""

    async def timeline(_conn: Any) -> str:
        return "0000ABCD"

    monkeypatch.setattr(streams.db, "timeline", timeline)


@pytest.mark.parametrize("resumed", [False, True], ids=["from the start", "resumed"])
async def test_a_log_that_was_lost_and_has_grown_to_the_same_length_ends_its_streams(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    agent, other = await server.agent(), await server.agent()
    agent_id, other_id = (decode(IdKind.AGENT, path.rsplit("/", 1)[1]) for path in (agent, other))
    for each in (agent_id, other_id):
        await append(server, each, 2)
    query = "?after_sequence=3" if resumed else ""
    async with open_stream(server, agent, query) as stream, open_stream(server, other, query) as intact:
        for one in (stream, intact):
            if not resumed:
                assert await one.events(3) == [1, 2, 3]
            frame = await one.next(within_s=20)
            assert frame is not None
            assert frame.comment == "heartbeat", "nothing has changed yet"
        await server.rows(OTHER_ID, agent_id, 3)
        promoted(monkeypatch)
        (last,) = await stream.rest(within_s=20)
        assert (last.event, "lost the end of this log" in str(last.data)) == ("error", True)
        await append(server, other_id, 1)
        assert await intact.events(1) == [4], "a log that lost nothing goes on"
        monkeypatch.undo()
        await append(server, other_id, 1)
        assert await intact.events(1) == [5]


async def test_a_log_that_was_lost_and_has_grown_beyond_ends_its_streams_before_they_go_on(server: ApiServer) -> None:
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
    await append(server, agent_id, 2)
    async with open_stream(server, agent) as stream:
        assert await stream.events(3) == [1, 2, 3]
        await server.rows(OTHER_ID, agent_id, 3)
        await append(server, agent_id, 2)
        (last,) = await stream.rest(within_s=20)
        assert (last.event, "lost the end of this log" in str(last.data)) == ("error", True)


async def test_what_came_in_between_two_looks_is_compared_too(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event is the new log's own; one before it is not what was sent."""
    agent = await server.agent()
    agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
    async with open_stream(server, agent) as stream:
        assert await stream.events(1) == [1]
        looks = server.hub._lost_tails
        monkeypatch.setattr(looks, "among", nobody)
        await append(server, agent_id, 3)
        assert await stream.events(3) == [2, 3, 4]
        await server.rows(OTHER_ID, agent_id, 3)
        promoted(monkeypatch)
        monkeypatch.setattr(looks, "among", type(looks).among.__get__(looks))
        (last,) = await stream.rest(within_s=20)
        assert (last.event, "lost the end of this log" in str(last.data)) == ("error", True)


async def nobody(_acquire: Any, _places: Any) -> set[Any]:
    return set()


async def test_the_sweep_is_one_query_for_all(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = streams.db.news

    async def counted(conn: Any, agents: Any, seen: Any) -> Any:
        calls.append(len(agents))
        return await real(conn, agents, seen)

    monkeypatch.setattr(streams.db, "news", counted)
    agents = [await server.agent() for _ in range(3)]
    opened = [open_stream(server, agent) for agent in agents * 4]
    for stream in opened:
        await stream.__aenter__()
    calls.clear()
    await until(lambda: len(calls) >= 2, "two sweeps")
    assert set(calls) == {12}
    for stream in opened:
        await stream.__aexit__(None, None, None)
