"""One stream over all agents of a project: nothing lost, nothing twice, in whatever order transactions commit."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
import pytest_asyncio

from omnara.access.roles import ProjectScope
from omnara.api import project_cursor, project_tail
from omnara.api.project_cursor import Place
from omnara.clock import Deadline
from omnara.db import project_log
from omnara.db.streams import Reading
from omnara.errors import Unavailable
from omnara.ids import IdKind, decode, new_uuid
from omnara.testing import ModelServer, embedded
from tests.contract.server import ApiServer, api_server, model_server
from tests.contract.stream_client import Frame, Stream, open_stream
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

Seen = list[tuple[str, int]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def model() -> AsyncIterator[ModelServer]:
    async with model_server(embedded) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def replicas(postgres: PostgresForTests, model: ModelServer) -> AsyncIterator[tuple[ApiServer, ApiServer]]:
    times = {"stream_sweep_s": 0.3, "stream_heartbeat_s": 0.4}
    async with (
        postgres.fresh() as dsn,
        api_server(dsn, model, **times) as one,
        api_server(dsn, model, roles=frozenset({"api"}), **times) as two,
    ):
        two.key = one.key
        yield one, two


@pytest_asyncio.fixture(loop_scope="session")
async def server(replicas: tuple[ApiServer, ApiServer]) -> ApiServer:
    return replicas[0]


def agent_id(agent: str) -> UUID:
    return decode(IdKind.AGENT, agent.rsplit("/", 1)[1])


APPEND = """with h as (update agent_sched set next_sequence = next_sequence + $2 where agent_id = $1
                       returning next_sequence - $2 as first, turn_id, turn_sequence)
            insert into events (agent_id, sequence, id, kind, turn_id, turn_sequence, payload)
            select $1, h.first + n, gen_random_uuid(), 'tool_result', h.turn_id, h.turn_sequence,
                   ('{"tool_call_id":"tcl_' || repeat('a', 26) || '","outcome":"succeeded","content_blocks":[]}')::json
            from h, generate_series(0, $2 - 1) n"""


async def append(server: ApiServer, agent: str, count: int = 1, *, tell: bool = True) -> None:
    """Append events as a use case does; without `tell`, as a replica whose hints were lost."""
    await server.rows(APPEND, agent_id(agent), count)
    if tell:
        server.deps.feed.wake(agent_id(agent))


async def whole_log(server: ApiServer) -> Counter[tuple[str, int]]:
    rows = await server.rows("select agent_id, sequence from events")
    return Counter((str(row["agent_id"]), row["sequence"]) for row in rows)


def event_of(frame: Frame) -> tuple[str, int]:
    return str(decode(IdKind.AGENT, frame.data["agent_id"])), frame.data["sequence"]


def check_order(seen: Seen) -> None:
    """Each agent's events come in order."""
    last: dict[str, int] = {}
    for agent, sequence in seen:
        assert sequence == last.get(agent, sequence - 1) + 1, (agent, sequence)
        last[agent] = sequence


async def take(stream: Stream, count: int, *, within_s: float = 15) -> tuple[Seen, list[str]]:
    """The next `count` events, and the id of each frame."""
    seen: Seen = []
    ids: list[str] = []
    async with asyncio.timeout(within_s):
        while len(seen) < count:
            frame = await stream.next(within_s=within_s)
            assert frame is not None, f"the stream ended after {len(seen)} of {count} events"
            if frame.event:
                assert frame.id is not None
                seen.append(event_of(frame))
                ids.append(frame.id)
    return seen, ids


async def first_place(stream: Stream) -> str:
    frame = await stream.next()
    assert frame is not None
    assert frame.id is not None
    assert not frame.event
    return frame.id


def joint(server: ApiServer, query: str = "", **options: Any) -> contextlib.AbstractAsyncContextManager[Stream]:
    return open_stream(server, server.scope, query, **options)


async def test_every_event_of_old_and_new_agents_once(server: ApiServer) -> None:
    old = await server.agent()
    async with joint(server) as live, joint(server, "?from=start") as whole:
        assert live.response.headers["Content-Type"] == "text/event-stream"
        await first_place(live)
        await server.say(old, "hello")
        new = await server.agent("hi there")
        seen, _ = await take(live, 5)
        check_order(seen)
        assert Counter(seen) == Counter(
            [(str(agent_id(old)), n) for n in (2, 3)] + [(str(agent_id(new)), n) for n in (1, 2, 3)]
        )
        everything, _ = await take(whole, 6)
        check_order(everything)
        assert Counter(everything) == await whole_log(server)
    stored = (await server.get(f"{new}/events"))["data"]
    async with joint(server, "?from=start") as stream:
        frames = await stream.told(6)
        assert [frame.data for frame in frames if frame.data["agent_id"] == new.rsplit("/", 1)[1]] == stored


async def test_resuming_after_any_frame_gives_exactly_the_rest(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, two = replicas
    agents = [await one.agent() for _ in range(7)]
    async with joint(one) as stream:
        start = await first_place(stream)
        for number in range(12):
            await append(one, agents[number % 7], 1 + number % 3, tell=number % 2 == 0)
        for agent in agents:
            await append(one, agent, 40)
        total = sum(1 + number % 3 for number in range(12)) + 280
        seen, ids = await take(stream, total)
    check_order(seen)
    assert len(set(ids)) == len(ids)
    for at, place in [(0, start), *((n + 1, ids[n]) for n in range(0, total, 17)), (total, ids[-1])]:
        rest = Counter(seen[at:])
        async with joint(two, headers={"Last-Event-ID": place}) as stream:
            again, _ = await take(stream, total - at)
            assert Counter(again) == rest, at
            check_order(again)
            await append(two, agents[0])
            (more,), _ = await take(stream, 1)
            assert more not in rest
        seen.append(more)
        total += 1


async def test_any_history_of_commits_and_reconnects(replicas: tuple[ApiServer, ApiServer]) -> None:
    """Writers whose transactions overlap, agents that appear, clients that come and go between replicas."""
    one, _ = replicas
    agents = [await one.agent() for _ in range(5)]
    dice = random.Random(7)
    done = asyncio.Event()

    async def write(number: int) -> None:
        for turn in range(25):
            target = agents[(number + turn) % len(agents)]
            async with one.deps.db.transaction() as connection:
                await connection.execute(APPEND, agent_id(target), dice.randint(1, 3))
                await asyncio.sleep(dice.random() * 0.02)
            if dice.random() < 0.7:
                one.deps.feed.wake(agent_id(target))
            if turn == 12:
                agents.append(await one.agent())

    async def follow(number: int) -> Seen:
        seen: Seen = []
        place: str | None = None
        own = random.Random(number)
        while True:
            replica = replicas[own.randrange(2)]
            headers = {} if place is None else {"Last-Event-ID": place}
            async with joint(replica, "?from=start", headers=headers) as stream:
                for _ in range(own.randrange(5, 60)):
                    finished = done.is_set()
                    try:
                        frame = await stream.next(within_s=2 if finished else 0.3)
                    except TimeoutError:
                        break
                    assert frame is not None
                    if frame.event:
                        seen.append(event_of(frame))
                    place = frame.id or place
                    if finished and Counter(seen) == await whole_log(one):
                        return seen

    async def writers() -> None:
        await asyncio.gather(*(write(number) for number in range(3)))
        done.set()

    async with asyncio.timeout(60):
        *found, _ = await asyncio.gather(*(follow(number) for number in range(4)), writers())
    expected = await whole_log(one)
    for seen in found:
        check_order(seen)
        assert Counter(seen) == expected


async def test_a_transaction_that_commits_late_is_not_overtaken(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, two = replicas
    slow, quick = await one.agent(), await one.agent()
    async with joint(one) as stream:
        await first_place(stream)
        async with two.deps.db.transaction() as connection:
            await connection.execute(APPEND, agent_id(slow), 2)
            await append(one, quick, 3)
            seen, ids = await take(stream, 3)
            assert {agent for agent, _ in seen} == {str(agent_id(quick))}
        expected = [(str(agent_id(slow)), n) for n in (2, 3)]
        assert (await take(stream, 2))[0] == expected, "the sweep finds it"
    async with joint(two, headers={"Last-Event-ID": ids[-1]}) as stream:
        assert (await take(stream, 2))[0] == expected


async def test_archived_agents_have_a_history_and_an_end(server: ApiServer) -> None:
    agent, other = await server.agent(), await server.agent()
    await append(server, agent, 2)
    async with joint(server, "?from=start") as stream:
        await take(stream, 4)
        assert (await server.call("POST", f"{agent}/archive")).status == 200
        await append(server, other)
        assert (await take(stream, 1))[0] == [(str(agent_id(other)), 2)], "the stream goes on"
    async with joint(server, "?from=start") as stream:
        assert Counter((await take(stream, 5))[0]) == await whole_log(server)


async def test_other_projects_are_not_shown(server: ApiServer) -> None:
    agent = await server.agent()
    other = new_uuid()
    org_id = decode(IdKind.ORG, server.org)
    await server.rows("insert into projects (id, org_id, name) values ($1, $2, 'other')", other, org_id)
    await server.rows("update agents set project_id = $2 where id = $1", agent_id(agent), other)
    await server.rows("update agent_sched set project_id = $2 where agent_id = $1", agent_id(agent), other)
    shown = await server.agent()
    async with joint(server, "?from=start") as stream:
        await append(server, agent, 3)
        await append(server, shown)
        assert (await take(stream, 2))[0] == [(str(agent_id(shown)), n) for n in (1, 2)]
    assert await server.rows("select from events where agent_id = $1", agent_id(agent))


# --- places -----------------------------------------------------------------------------------------------


async def test_what_is_no_place_is_refused(server: ApiServer) -> None:
    await server.agent()
    async with joint(server) as stream:
        good = await first_place(stream)
    project = decode(IdKind.PROJECT, server.project)
    async with server.deps.db.acquire() as connection:
        here = await project_log.here(connection)
    ahead = msgspec.structs.replace(here.mark, snapshot="99999999:99999999:")
    foreign = (
        project_cursor.encode(new_uuid(), here.database, Place(here.mark)),
        project_cursor.encode(project, "1/1", Place(here.mark)),
        project_cursor.encode(project, here.database, Place(ahead)),
        project_cursor.encode(project, here.database, Place(here.mark, ahead, new_uuid(), 1)),
    )
    malformed = [
        project_cursor.encode(project, here.database, Place(msgspec.structs.replace(here.mark, **change)))
        for change in (
            {"snapshot": "1"},
            {"snapshot": "5:3:"},
            {"snapshot": "3:9:4,4"},
            {"snapshot": "3:9:9"},
            {"snapshot": "3:9:'"},
            {"timeline": "x"},
            {"taken_at": datetime(1960, 1, 1, tzinfo=UTC)},
        )
    ]
    for wrong in (*foreign, *malformed, good[:-4], good + "AAAA", "1", "17", "*", "%20", "a" * 9000):
        answer = await server.call("GET", f"{server.scope}/events/stream?after={wrong}")
        assert (answer.status, answer.code) == (400, "invalid_request"), wrong
    for query in ("?after=", "?from=", "?from=later", "?after_sequence=1", "?stream_deltas=true"):
        answer = await server.call("GET", f"{server.scope}/events/stream{query}")
        assert (answer.status, answer.code) == (400, "validation_failed"), query
    answer = await server.call("GET", f"{server.scope}/events/stream", headers={"Last-Event-ID": ""})
    assert (answer.status, answer.code) == (400, "validation_failed")
    async with joint(server, f"?after={good}") as stream:
        assert await first_place(stream) == good


async def test_after_a_failover_the_last_minute_is_sent_again_and_nothing_is_lost(server: ApiServer) -> None:
    """In another timeline the ids of transactions mean nothing, so only time tells what a client has."""
    agent, still = await server.agent(), await server.agent()
    await append(server, agent, 4)
    await server.rows("update events set created_at = created_at - interval '10 minutes' where sequence < 4")
    async with joint(server, "?from=start") as stream:
        _, ids = await take(stream, 6)
    project = decode(IdKind.PROJECT, server.project)
    async with server.deps.db.acquire() as connection:
        here = await project_log.here(connection)
    place = project_cursor.decode(project, here, ids[-1])
    assert place.until is not None
    # The client was up to date, in the history that ended: a snapshot that claims to have seen every transaction.
    before = msgspec.structs.replace(place.until, timeline="000000FF", snapshot="99999999:99999999:")
    after = project_cursor.encode(project, here.database, Place(before))
    await append(server, still)
    async with joint(server, f"?after={after}") as stream:
        seen, _ = await take(stream, 3)
        assert Counter(seen) == Counter([(str(agent_id(agent)), n) for n in (4, 5)] + [(str(agent_id(still)), 2)])


async def test_a_batch_cut_by_a_failover_is_sent_again(server: ApiServer) -> None:
    agent = await server.agent()
    async with joint(server) as stream:
        await first_place(stream)
        await append(server, agent, 3)
        seen, ids = await take(stream, 3)
    project = decode(IdKind.PROJECT, server.project)
    async with server.deps.db.acquire() as connection:
        here = await project_log.here(connection)
    place = project_cursor.decode(project, here, ids[1])
    assert place.until is not None
    assert place.since is not None
    cut = Place(place.since, msgspec.structs.replace(place.until, timeline="000000FF"), place.agent_id, place.sequence)
    async with joint(server, f"?after={project_cursor.encode(project, here.database, cut)}") as stream:
        assert (await take(stream, 3))[0] == seen


async def test_old_transactions_are_known_by_their_time(server: ApiServer) -> None:
    """A row keeps 32 bits of its transaction's id, so an old one may look like a new one: time decides for it."""
    agent = await server.agent()
    await append(server, agent, 2)
    async with server.deps.db.acquire() as connection:
        here = await project_log.here(connection)
        nothing_seen = msgspec.structs.replace(
            here.mark, snapshot="3:3:", taken_at=here.mark.taken_at + timedelta(hours=2)
        )
        project = decode(IdKind.PROJECT, server.project)
        found = await project_log.growth(connection, project, nothing_seen, None, UUID(int=0), 10)
        assert found.growth == [], "rows that look newer than the snapshot and are older than an hour before it"
        recent = msgspec.structs.replace(nothing_seen, taken_at=here.mark.taken_at)
        found = await project_log.growth(connection, project, recent, None, UUID(int=0), 10)
        assert [(item.low, item.high) for item in found.growth] == [(0, 3)]


async def test_agents_are_looked_through_in_portions(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_tail, "AGENTS_PER_LOOK", 3)
    agents = [await server.agent() for _ in range(10)]
    async with joint(server) as stream:
        await first_place(stream)
        for agent in agents:
            await append(server, agent, 2, tell=False)
        seen, ids = await take(stream, 20)
    check_order(seen)
    assert len(set(seen)) == 20
    for at in (0, 4, 5, 6, 7, 19):
        async with joint(server, f"?after={ids[at]}") as stream:
            assert Counter((await take(stream, 19 - at))[0]) == Counter(seen[at + 1 :])


# --- cost and ends ----------------------------------------------------------------------------------------


async def test_a_frame_is_made_once_for_all_readers(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await server.agent()
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(joint(server)) for _ in range(8)]
        for stream in streams:
            await first_place(stream)
        await append(server, agent, tell=False)
        for stream in streams:
            await take(stream, 1)
        made: list[Place] = []
        real = project_cursor.encode

        def counted(project_id: UUID, database: str, place: Place) -> str:
            made.append(place)
            return real(project_id, database, place)

        monkeypatch.setattr(project_cursor, "encode", counted)
        await append(server, agent, 5)
        found = [await take(stream, 5) for stream in streams]
        assert all(one == found[0] for one in found)
        assert len(made) == 5


async def test_a_reader_that_is_slow_loses_its_queue_and_nothing_else() -> None:
    reader = project_tail.ProjectReader()
    frame = project_tail.ProjectFrame(b"x" * 1000, Place(None))
    held = 0
    for _ in range(2 * project_tail.QUEUE_BYTES // 1000):
        reader.offer(frame)
        held = max(held, len(reader._items) * 1000)
    assert held <= project_tail.QUEUE_BYTES
    assert reader.behind
    assert reader.take() == []
    async with asyncio.timeout(20):
        await reader.wait()
    reader.begin()
    reader.offer(frame)
    assert reader.take() == [frame]


async def test_a_stream_that_fell_behind_goes_on_from_where_it_was(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_tail, "QUEUE_BYTES", 2000)
    agents = [await server.agent() for _ in range(3)]
    async with joint(server) as stream:
        await first_place(stream)
        for _ in range(20):
            for agent in agents:
                await append(server, agent, 3)
        seen, _ = await take(stream, 180)
    check_order(seen)
    assert len(set(seen)) == 180


async def test_heartbeats_revocation_and_leaving(server: ApiServer) -> None:
    viewer = await server.user("viewer")
    stranger = await server.user(None)
    assert (await server.call("GET", f"{server.scope}/events/stream", key=stranger)).status == 404
    assert (await server.call("GET", f"{server.scope}/events/stream", key=None)).status == 401
    async with joint(server, key=viewer) as stream, joint(server) as other:
        await first_place(stream)
        for _ in range(2):
            frame = await stream.next(within_s=20)
            assert frame is not None
            assert frame.comment == "heartbeat"
        await server.rows(
            "update personal_access_tokens set revoked_at = now() where user_id in "
            "(select user_id from project_members where role = 'viewer')"
        )
        assert await stream.rest(within_s=20.0) == []
        await first_place(other)
        agent = await server.agent()
        assert (await take(other, 1))[0] == [(str(agent_id(agent)), 1)]
    await until(lambda: len(server.hub) == 0, "the streams are closed")
    assert server.hub._tails._tails == {}
    assert server.deps.feed._watchers == []


async def test_shutdown_ends_it_and_says_so(postgres: PostgresForTests, model: ModelServer) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, model) as server, joint(server) as stream:
        await first_place(stream)
        await server.hub.drain(Deadline(20))
        (last,) = await stream.rest(within_s=20)
        assert (last.event, last.data["code"]) == ("error", "service_unavailable")
        refused = await server.call("GET", f"{server.scope}/events/stream")
        assert (refused.status, refused.code) == (503, "service_unavailable")


async def test_looks_are_shared(server: ApiServer) -> None:
    """Fifty clients that come at once cost two looks, not fifty."""
    scope = ProjectScope(decode(IdKind.ORG, server.org), decode(IdKind.PROJECT, server.project))
    async with server.hub.open_project(scope, reading=Reading(new_uuid(), scope.project_id)) as (_, following):
        before = following.tail._looks
        await asyncio.gather(*(following.tail.look() for _ in range(50)))
        assert following.tail._looks - before <= 3


async def test_agent_streams_resume_on_another_replica(replicas: tuple[ApiServer, ApiServer]) -> None:
    """Ids are numbers, not texts, and mean the same everywhere. Source: field-reports B32."""
    one, two = replicas
    agent = await one.agent()
    await append(one, agent, 14)
    async with open_stream(one, agent) as stream:
        assert await stream.events(15) == list(range(1, 16))
    for last in (9, 10, 14):
        async with open_stream(two, agent, headers={"Last-Event-ID": str(last)}) as stream:
            assert await stream.events(15 - last) == list(range(last + 1, 16))
    for wrong in ("100", "agt_x", "1 0"):
        answer = await two.call("GET", f"{agent}/events/stream", headers={"Last-Event-ID": wrong})
        assert answer.status == 400


async def test_many_clients_join_while_agents_write(replicas: tuple[ApiServer, ApiServer]) -> None:
    one, _ = replicas
    agents = [await one.agent() for _ in range(4)]

    async def read(number: int) -> Seen:
        async with joint(replicas[number % 2], "?from=start") as stream:
            return (await take(stream, 4 + 160, within_s=30))[0]

    async def write() -> None:
        for turn in range(40):
            await append(one, agents[turn % 4], 4, tell=turn % 3 > 0)

    *found, _ = await asyncio.gather(*(read(number) for number in range(60)), write())
    expected = await whole_log(one)
    for seen in found:
        check_order(seen)
        assert Counter(seen) == expected


async def test_an_outage_of_the_database_is_waited_for(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await server.agent()
    refused = 0
    real = project_log.growth

    async def away(*_: Any, **__: Any) -> Any:
        nonlocal refused
        refused += 1
        raise Unavailable("the database is away")

    async with joint(server) as follower:
        await first_place(follower)
        await append(server, agent)
        await take(follower, 1)
        monkeypatch.setattr(project_log, "growth", away)
        await append(server, agent, 3)
        async with joint(server, "?from=start") as newcomer:
            await until(lambda: refused >= 4, "both the tail and the newcomer were refused again and again")
            frame = await newcomer.next(within_s=20)
            assert frame is not None
            assert frame.comment == "heartbeat", "the stream stays open"
            monkeypatch.setattr(project_log, "growth", real)
            assert [n for _, n in (await take(follower, 3))[0]] == [3, 4, 5]
            assert [n for _, n in (await take(newcomer, 5))[0]] == [1, 2, 3, 4, 5]


async def test_what_a_stream_could_not_read_comes_before_what_is_new(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database refuses a newcomer its history and answers the tail: nothing new is sent past what is missing."""
    agent = await server.agent()
    refused = 0
    real = project_tail.ProjectTail.missed

    async def away(*_: Any, **__: Any) -> Any:
        nonlocal refused
        refused += 1
        raise Unavailable("the database is away")
        yield

    async with joint(server) as follower:
        await first_place(follower)
        await append(server, agent)
        await take(follower, 1)
        monkeypatch.setattr(project_tail.ProjectTail, "missed", away)
        async with joint(server, "?from=start") as newcomer:
            await until(lambda: refused >= 1, "the newcomer was refused")
            await append(server, agent, 3)
            assert [n for _, n in (await take(follower, 3))[0]] == [3, 4, 5], "the tail has handed it on"
            await until(lambda: refused >= 3, "the newcomer has asked again")
            monkeypatch.setattr(project_tail.ProjectTail, "missed", real)
            assert [n for _, n in (await take(newcomer, 5))[0]] == [1, 2, 3, 4, 5]
