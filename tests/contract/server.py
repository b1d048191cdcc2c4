"""A whole server inside the test: every service on a real Postgres, with the contract's checker on its answers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import UUID

import aiohttp
import msgspec

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.api.streams import StreamHub
from omnara.app.listeners import Listener
from omnara.app.parts import Parts, build, build_gateway
from omnara.clock import Deadline, poll_until
from omnara.db.checks import run_checks
from omnara.db.connection import Connection, ConnectSettings
from omnara.db.pool import ApiPool
from omnara.engine.bootstrap import environment_providers, first_start
from omnara.ids import IdKind, decode, encode, new_uuid
from omnara.machines.providers.places import PLACES, Place
from omnara.metrics import Metrics
from omnara.settings import Address, Settings
from omnara.testing import ModelServer, Strictness
from omnara.testing.script import Script
from omnara.vault import generate_ring
from tests.contract.checker import Checker

RING = generate_ring()
MODEL = "claude-sonnet-4-6"
CONFIG = "instruction: Be brief.\nmodel:\n  provider_config: anthropic\n  name: " + MODEL + "\n"


class Answered(msgspec.Struct):
    """An answer of the server."""

    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        """The body."""
        return msgspec.json.decode(self.text)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.json["code"])


class ApiServer:
    """A running server and a client of it with the owner's key."""

    def __init__(self, parts: Parts, checker: Checker, session: aiohttp.ClientSession, key: str) -> None:
        self.parts = parts
        self.deps = parts.deps
        self.checker = checker
        self.session = session
        self.key = key
        self.org = ""
        self.project = ""
        host, port = next(part for part in parts.services if isinstance(part, Listener)).addresses[0]
        self.host, self.port = host, port
        self.url = f"http://{host}:{port}"

    @property
    def hub(self) -> StreamHub:
        """The keeper of streams."""
        return next(part for part in self.parts.services if isinstance(part, StreamHub))

    @property
    def scope(self) -> str:
        """The path of the project."""
        return f"/api/v1/orgs/{self.org}/projects/{self.project}"

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Answered:
        """Send a request. `body` is encoded as JSON unless it is bytes; `key` overrides the bearer key."""
        key = options.pop("key", self.key)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
            body = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        headers |= options.pop("headers", {})
        async with self.session.request(method, self.url + path, data=body, headers=headers, **options) as response:
            return Answered(response.status, response.headers, await response.text())

    async def get(self, path: str, **options: Any) -> Any:
        """GET and return the JSON of a 200."""
        answer = await self.call("GET", path, **options)
        assert answer.status == 200, answer.text
        return answer.json

    async def config(self, source: str = CONFIG) -> str:
        """Make a config; return its id."""
        answer = await self.call("POST", f"{self.scope}/agent-configs", {"source": source, "source_format": "yaml"})
        assert answer.status in {200, 201}, answer.text
        return str(answer.json["id"])

    async def agent(self, message: str | None = None, *, source: str = CONFIG) -> str:
        """Launch an agent; return its path."""
        body = {"config": await self.config(source), **({} if message is None else {"message": message})}
        answer = await self.call("POST", f"{self.scope}/agents", body)
        assert answer.status == 201, answer.text
        return f"{self.scope}/agents/{answer.json['agent']['id']}"

    async def say(self, agent: str, text: str, **more: Any) -> Answered:
        """Send a message."""
        return await self.call("POST", f"{agent}/inputs", {"content_blocks": [{"type": "text", "text": text}], **more})

    async def user(self, role: str | None = "viewer") -> str:
        """Make another member of the organization, with a role in the project or none; return its key."""
        token = tokens.generate(TokenKind.PERSONAL)
        user_id = new_uuid()
        org_id, project_id = decode(IdKind.ORG, self.org), decode(IdKind.PROJECT, self.project)
        async with self.deps.db.transaction() as connection:
            await connection.execute("insert into users (id, display_name) values ($1, 'Other')", user_id)
            await connection.execute("insert into org_members values ($1, $2, 'member')", org_id, user_id)
            if role is not None:
                await connection.execute("insert into project_members values ($1, $2, $3)", project_id, user_id, role)
            await insert_token(connection, user_id, token.text)
        return token.text

    async def org_key(self, role: str = "operator") -> str:
        """Make an organization key with a role in the project; return it."""
        token = tokens.generate(TokenKind.ORG)
        key_id = new_uuid()
        async with self.deps.db.transaction() as connection:
            await connection.execute(
                "insert into org_api_keys (id, org_id, name, org_role, token_id, token_hash)"
                " values ($1, $2, $3, 'member', $4, $5)",
                key_id,
                decode(IdKind.ORG, self.org),
                str(key_id),
                tokens.new_token_id(),
                token.hash,
            )
            await connection.execute(
                "insert into org_api_key_projects values ($1, $2, $3)",
                key_id,
                decode(IdKind.PROJECT, self.project),
                role,
            )
        return token.text

    async def settled(self, agent: str, status: str = "idle") -> Any:
        """Wait until an agent has this status; return what the flat route says of it."""
        found: Any = None

        async def check() -> bool:
            nonlocal found
            found = await self.get(f"/agents/{agent.rsplit('/', 1)[1]}")
            return bool(found["status"] == status)

        assert await poll_until(check, within_s=15, every_s=0.02), found
        return found

    async def rows(self, query: str, *values: Any) -> list[Any]:
        """Run SQL of a test."""
        async with self.deps.db.acquire() as connection:
            return list(await connection.fetch(query, *values))


async def invariants_hold(server: ApiServer) -> None:
    """Fail when a query that must return no row returns one."""
    async with server.deps.db.acquire() as connection:
        broken = {check.name: check.broken for check in await run_checks(connection) if check.broken}
    assert not broken, broken


def model_server(script: Script) -> ModelServer:
    """A scripted model under any name."""
    return ModelServer(script, strict=Strictness(models=None))


@contextlib.asynccontextmanager
async def api_server(
    database: str,
    model: ModelServer | None = None,
    *,
    roles: frozenset[Any] | None = None,
    places: Mapping[str, Place] = PLACES,
    **settings: Any,
) -> AsyncIterator[ApiServer]:
    """Run a server with a model provider `anthropic`; at the end fail on every answer that the contract forbids."""
    token = tokens.generate(TokenKind.PERSONAL)
    given: dict[str, Any] = {
        "listen": Address("127.0.0.1", 0),
        "roles": roles if roles is not None else frozenset({"api", "worker"}),
        # Machines are made only for tests that say where.
        "docker_host": "off",
        "local_machines": "off",
        "anthropic_api_key": "sk-test-key-of-the-suite",
        "anthropic_base_url": "http://127.0.0.1:9" if model is None else model.url,
        "allowed_private_hosts": ("127.0.0.1",),
        "database_url": database,
    }
    chosen = Settings(**(given | settings))
    connect = ConnectSettings(dsn=database)
    first = await _set_up(connect, chosen, token.text)
    gateway = build_gateway(chosen)
    parts = build(chosen, connect, RING, Metrics.create(), gateway, places=places)
    checker = Checker()
    for part in parts.services:
        if isinstance(part, Listener):
            checker.install(part._runner.app)  # type: ignore[attr-defined]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close)
        for part in parts.services:
            stack.push_async_callback(part.stop)
            await part.start()
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=30))
        )
        server = ApiServer(parts, checker, session, token.text)
        server.org, server.project = first
        yield server
        await server.hub.drain(Deadline(1))
    assert not checker.violations, "\n".join(checker.violations)


async def _set_up(connect: ConnectSettings, settings: Settings, key: str) -> tuple[str, str]:
    pool = ApiPool(connect)
    await pool.start()
    try:
        first = await first_start(pool, RING, key)
        await environment_providers(pool, RING, settings)
        if not first.created:
            async with pool.transaction() as connection:
                await insert_token(connection, first.org.user_id, key)
    finally:
        await pool.close()
    return encode(IdKind.ORG, first.org.org_id), encode(IdKind.PROJECT, first.org.project_id)


async def insert_token(connection: Connection, user_id: UUID, key: str) -> None:
    """Make a personal key of a user."""
    await connection.execute(
        "insert into personal_access_tokens (id, user_id, name, token_id, token_hash) values ($1, $2, 'test', $3, $4)",
        new_uuid(),
        user_id,
        tokens.new_token_id(),
        tokens.hash_token(key),
    )
