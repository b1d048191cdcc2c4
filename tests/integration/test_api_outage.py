"""When the database is away or clients leave: 503 with Retry-After, surviving streams, no leaked connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import asyncpg
import pytest
from aiohttp import web

from omnara.api.ops import Readiness, build_ops_app
from omnara.api.server import ApiRunner
from omnara.errors import Unavailable
from omnara.ids import IdKind, decode
from omnara.metrics import Metrics
from tests.contract.server import api_server
from tests.contract.stream_client import open_stream
from tests.support.postgres import PostgresForTests
from tests.support.waiting import until

API_ONLY = frozenset({"api"})


async def test_outage(postgres: PostgresForTests) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=API_ONLY, stream_sweep_s=0.2) as server:
        agent = await server.agent()
        agent_id = decode(IdKind.AGENT, agent.rsplit("/", 1)[1])
        async with open_stream(server, agent) as stream:
            assert await stream.events(1) == [1]
            admin = await asyncpg.connect(postgres.admin_dsn)
            name = dsn.rsplit("/", 1)[1].split("?")[0]
            try:
                await admin.execute(f'alter database "{name}" with allow_connections false')
                await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name)

                async def refused() -> bool:
                    answer = await server.call("GET", agent)
                    return answer.status == 503

                await until(refused, "requests are refused")
                answer = await server.call(
                    "POST", f"{agent}/inputs", {"content_blocks": [{"type": "text", "text": "x"}]}
                )
                assert (answer.status, answer.code) == (503, "service_unavailable")
                assert int(answer.headers["Retry-After"]) >= 1
                assert name not in answer.text
                opened = await server.call("GET", f"{agent}/events/stream")
                assert opened.status == 503
                alive = await server.call("GET", "/healthz", key=None)
                assert (alive.status, alive.json) == (200, {"status": "ok"})
                server.deps.feed.wake(agent_id)
            finally:
                await admin.execute(f'alter database "{name}" with allow_connections true')
                await admin.close()

            async def accepted() -> bool:
                answer = await server.call("GET", agent)
                return answer.status == 200

            await until(accepted, "requests are served again")
            change = {"source": "instruction: x\nmodel: {provider_config: anthropic, name: claude-sonnet-4-6}\n"}
            changed = await server.call("POST", f"{agent}/config", change | {"source_format": "yaml"})
            assert changed.status == 200, changed.text
            assert await stream.events(1, within_s=20) == [2], "the same stream goes on"


async def test_clients_that_leave_early_leak_no_connection(postgres: PostgresForTests) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=API_ONLY) as server:
        agent = await server.agent()
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        body = b'{"content_blocks":[{"type":"text","text":"x"}]}'

        async def leave(number: int) -> None:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(0.001 + (number % 50) / 1000):
                    if number % 2:
                        await server.session.get(f"{server.url}{agent}/events", headers=headers)
                    else:
                        await server.session.post(f"{server.url}{agent}/inputs", data=body, headers=headers)

        for start in range(0, 400, 100):
            await asyncio.gather(*(leave(number) for number in range(start, start + 100)))
        for _ in range(10):
            assert (await server.call("GET", agent)).status == 200
        await until(lambda: server.deps.db.in_use == 0, "connections are back")
        idle = await server.rows(
            "select count(*) as n from pg_stat_activity where state like 'idle in transaction%'"
            " and datname = current_database()"
        )
        assert idle[0]["n"] == 0


async def test_a_bug_is_an_internal_error_that_tells_nothing(
    postgres: PostgresForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=API_ONLY) as server:

        async def broken(*_args: object, **_options: object) -> object:
            raise RuntimeError("the password is hunter2")

        monkeypatch.setattr("omnara.engine.reads.get_agent_machines", broken)
        agent = await server.agent()
        answer = await server.call("GET", agent)
        assert (answer.status, answer.json) == (500, {"error": "internal server error", "code": "internal_error"})
        text = server.deps.metrics.expose().decode()
        assert 'status="500"' in text


async def test_requests_are_counted_by_route_not_by_id(postgres: PostgresForTests) -> None:
    async with postgres.fresh() as dsn, api_server(dsn, roles=API_ONLY) as server:
        agent = await server.agent()
        first = await server.call("GET", agent)
        second = await server.call("GET", "/nowhere")
        assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]
        text = server.deps.metrics.expose().decode()
        route = "/api/v1/orgs/{orgID}/projects/{projectID}/agents/{agentID}"
        assert f'omnara_http_requests_total{{method="GET",route="{route}",status="200"}} 1.0' in text
        assert 'route="unmatched",status="404"' in text
        assert agent.rsplit("/", 1)[1] not in text


# --- ops listener -----------------------------------------------------------------------------------------


class Ops:
    """An ops listener whose readiness the test decides."""

    def __init__(self) -> None:
        self.answer: Readiness | BaseException = Readiness(True)
        self.hold: asyncio.Event | None = None

    async def check(self) -> Readiness:
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("found", "status", "reason"),
    [
        (Readiness(True), 200, None),
        (Readiness(False, "draining"), 503, "draining"),
        (Unavailable("secret host"), 503, "the check failed"),
        (RuntimeError("secret host"), 503, "the check failed"),
    ],
)
async def test_readiness(found: Readiness | BaseException, status: int, reason: str | None) -> None:
    ops = Ops()
    ops.answer = found
    async with ops_server(ops) as (session, url):
        async with session.get(f"{url}/readyz") as response:
            body = await response.json()
        assert (response.status, body.get("reason")) == (status, reason)
        async with session.get(f"{url}/healthz") as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")
        async with session.get(f"{url}/metrics") as response:
            assert "omnara_open_streams" in await response.text()
        for method, path in (("HEAD", "/healthz"), ("POST", "/readyz"), ("GET", "/api/v1/me")):
            async with session.request(method, url + path) as response:
                assert response.status == 404


async def test_readiness_gives_up_after_two_seconds() -> None:
    ops = Ops()
    ops.hold = asyncio.Event()
    async with ops_server(ops) as (session, url), asyncio.timeout(20), session.get(f"{url}/readyz") as response:
        assert response.status == 503
        assert "2 s" in (await response.json())["reason"]


@contextlib.asynccontextmanager
async def ops_server(ops: Ops) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    runner = ApiRunner(build_ops_app(Metrics.create(), ops.check, started_at="2026-01-01T00:00:00+00:00"))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            yield session, f"http://{host}:{port}"
    finally:
        await runner.cleanup()
