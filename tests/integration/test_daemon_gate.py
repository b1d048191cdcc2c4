"""Machines that ask for far too much: others are served as if nothing were, and no daemon is told that it is nobody."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.api.daemon import gate
from omnara.api.daemon import socket as daemon_socket
from omnara.api.daemon.gate import AT_ONCE
from tests.contract.server import ApiServer, api_server
from tests.integration.test_machine_sessions import QUICK, Bench, make_bench
from tests.support.machines import BASE, RawDaemon, raw_daemon
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(postgres: PostgresForTests) -> AsyncIterator[ApiServer]:
    async with postgres.fresh() as dsn, api_server(dsn, roles=frozenset({"api"}), **QUICK) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is let in waits for as long as a busy computer takes."""
    monkeypatch.setattr(gate, "PATIENCE_S", 60.0)


@pytest_asyncio.fixture(loop_scope="session")
async def bench(server: ApiServer) -> Bench:
    return await make_bench(server)


async def registered(daemon: RawDaemon) -> tuple[int, str | None]:
    """Register as a daemon of its own; status and `Retry-After`."""
    body: dict[str, Any] = {"daemon_instance_id": str(uuid4()), "daemon_version": "1.2.3", "processes": []}
    path = f"{daemon.url}{BASE}/runtimes"
    async with daemon.session.post(path, json=body, headers=daemon.headers) as answer:
        await answer.read()
        return answer.status, answer.headers.get("Retry-After")


async def one_waits(server: ApiServer) -> bool:
    """Whether exactly one of the API's connections waits for a row."""
    [row] = await server.rows(
        """select count(*) as found from pg_stat_activity where datname = current_database()
           and application_name = 'omnara:api' and wait_event_type = 'Lock'"""
    )
    return bool(row["found"] == 1)


async def test_one_token_takes_one_connection_and_is_refused_most_of_what_it_asks(bench: Bench) -> None:
    """Its machine's row is held, so whatever is let in waits; an open socket does not count."""
    server = bench.server
    sql = await asyncpg.connect(server.deps.settings.database_url)
    async with raw_daemon(server.url, bench.machine) as daemon:
        async with sql.transaction():
            await sql.execute("select 1 from machines where id = $1 for update", bench.machine.id)
            many = [asyncio.create_task(registered(daemon)) for _ in range(50)]
            over = 50 - AT_ONCE
            await until(lambda: sum(task.done() for task in many) >= over, "the rest is refused at once")
            answers = [task.result() for task in many if task.done()]
            assert Counter(answers) == {(503, "2"): over}
            await until(lambda: one_waits(server), "one of those that were let in waits for the row")
            for _ in range(3):
                assert (await server.call("GET", f"/api/v1/orgs/{server.org}/machines")).status == 200
        rest = Counter(status for status, _ in await asyncio.gather(*many))
        assert rest == {503: over, 201: AT_ONCE}
        assert await registered(daemon) == (201, None), "there is room again"
    await sql.close()
    assert server.deps.metrics.machine_requests_refused.labels("token")._value.get() == over


async def test_tokens_that_nobody_issued_are_refused_and_a_daemon_beside_them_is_not(bench: Bench) -> None:
    server = bench.server
    async with raw_daemon(server.url, bench.machine) as daemon:

        async def stranger() -> int:
            token = tokens.generate(TokenKind.DAEMON).text
            return (await server.call("POST", f"{BASE}/bootstrap", key=token)).status

        flood = [asyncio.create_task(stranger()) for _ in range(60)]
        own = [(await daemon.call("POST", "/bootstrap"))[0] for _ in range(5)]
        assert own == [200] * 5
        assert set(await asyncio.gather(*flood)) <= {401, 503}


async def test_an_open_socket_is_no_request_and_the_newest_counts(bench: Bench) -> None:
    async with raw_daemon(bench.server.url, bench.machine) as daemon:
        *older, newest = [daemon.socket, *[await daemon.connect() for _ in range(AT_ONCE + 2)]]
        for socket in older:
            assert (await socket.receive(timeout=10)).data == 1000
        await daemon.beat()
        await daemon.expect("heartbeat_ack")
        assert (await daemon.call("POST", "/bootstrap"))[0] == 200
        assert not newest.closed


async def test_a_machine_that_answers_no_ping_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_socket, "PING_S", 0.1)
    async with raw_daemon(bench.server.url, bench.machine, connected=False) as daemon:
        await daemon.register()
        path = f"{daemon.url}{BASE}/runtimes/{daemon.runtime}/socket"
        async with daemon.session.ws_connect(path, headers=daemon.headers, autoping=False):
            query = "select connected_at from machine_runtimes where machine_id = $1"
            assert (await bench.sql.fetch(query, bench.machine.id))[0][0] is not None, "it was there"
            await until(lambda: offline(bench), "it is out of reach")


async def state(bench: Bench) -> str:
    [row] = await bench.sql.fetch("select state from machine_connections where machine_id = $1", bench.machine.id)
    return str(row[0])


async def offline(bench: Bench) -> bool:
    return await state(bench) == "offline"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_registration_has_a_mebibyte(bench: Bench, chunked: bool) -> None:
    async with raw_daemon(bench.server.url, bench.machine, connected=False) as daemon:
        too_much = b'{"daemon_instance_id": "' + b"a" * 2**20 + b'"}'

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(too_much), 65_536):
                yield too_much[start : start + 65_536]

        headers = daemon.headers | {"Content-Type": "application/json"}
        data = pieces() if chunked else io.BytesIO(too_much)
        async with daemon.session.post(f"{daemon.url}{BASE}/runtimes", data=data, headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (413, "request_too_large")
        await daemon.register()
