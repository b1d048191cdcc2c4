"""Secrets that must not be seen: after every way in which one could get out, it is searched for where people look.

Source: field-reports B16; DESIGN §2 (invariant 7).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import psutil

from omnara.client import Client, Event
from omnara.testing import Fault, HttpError, ModelServer, StreamError, embed, embedded, say
from tests.e2e.served import Served, served
from tests.support.postgres import PostgresForTests

OF_A_TENANT = "sk-canary-of-a-tenant-5d2e81"
OF_THE_SERVER = "sk-canary-of-the-server-90ab3c"
IN_A_BODY = "canary-in-a-wrong-body-1c77fe"
CANARIES = (OF_A_TENANT, OF_THE_SERVER, IN_A_BODY)


def echoes(key: str) -> tuple[Fault, ...]:
    """What a provider says that repeats the key it was called with."""
    return (
        HttpError(401, message=f"Incorrect API key provided: {key}"),
        HttpError(400, message=f"Bearer {key} may not do this", code=key),
        HttpError(403, body=f"<html>x-api-key: {key}</html>", headers={"x-request-id": key}),
        HttpError(500, message=f"upstream said no to {key}"),
        StreamError("mid_text", "authentication_error", f"key {key} is revoked"),
    )


class Tenant:
    """An organization's owner at the HTTP API; keeps all that was answered."""

    def __init__(self, server: Served, session: aiohttp.ClientSession) -> None:
        self.answers: list[str] = []
        self._server = server
        self._session = session

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self._server.key}"}
        async with self._session.request(method, self._server.url + path, json=body, headers=headers) as response:
            self.answers.append(f"{dict(response.headers)} {await response.text()}")
            return await response.json()

    async def model(self, org: str, project: str, endpoint: str) -> str:
        """A provider of the tenant's own, with the canary as its key; the path of its config."""
        secret = {"owner": {"kind": "org"}, "name": "key", "material": {"kind": "generic", "value": OF_A_TENANT}}
        made = await self.call("POST", f"{org}/secrets", secret)
        provider = {
            "name": "lab",
            "api_format": "openai-chat-completions",
            "base_url": f"{endpoint}/v1",
            "credential_secret_id": made["id"],
        }
        config = (await self.call("POST", f"{org}/model-provider-configs", provider))["config"]
        path = f"{org}/model-provider-configs/{config['id']}"
        facts = {"name": "main", "provider_model_slug": "scripted", "context_window_tokens": 100_000}
        model = await self.call("POST", f"{path}/models", facts)
        await self.call("POST", f"{project}/model-grants", {"configured_model_id": model["id"]})
        return path


async def everything(dsn: str) -> str:
    """All rows of all tables as text, bytes in hexadecimal."""
    connection = await asyncpg.connect(dsn)
    try:
        found = []
        for [table] in await connection.fetch(
            "select quote_ident(tablename) from pg_tables where schemaname = 'public'"
        ):
            found += [row[0] for row in await connection.fetch(f"select t::text from {table} t")]
        return "\n".join(found)
    finally:
        await connection.close()


async def answered(client: Client, tenant: Tenant, model: str) -> None:
    """An agent of this model gets a message; what its stream shows, up to the end of the turn, is kept."""
    agent = await client.launch(model=model, system_prompt="Be brief.")
    async with client.stream(agent.id, deltas=True) as events:
        await client.send(agent.id, embed(say("a text that can be cut")))
        async for event in events:
            tenant.answers.append(repr(event))
            if isinstance(event, Event) and event.kind == "model_output":
                break
    tenant.answers.append(repr(await client.status(agent.id)))


async def test_a_canary_is_seen_nowhere(postgres: PostgresForTests, tmp_path: Path) -> None:
    async with ModelServer(embedded, lenient=True) as model, postgres.fresh() as dsn:
        extra = {"ANTHROPIC_API_KEY": OF_THE_SERVER, "OMNARA_LOG_LEVEL": "debug"}
        async with served(dsn, tmp_path, model, extra) as server, aiohttp.ClientSession() as session:
            tenant = Tenant(server, session)
            async with Client(server.url, server.key) as client:
                project = await client.project_path()
                org = project.partition("/projects/")[0]
                provider = await tenant.model(org, project, model.url)
                await tenant.call("GET", f"{provider}/model-catalog")
                await tenant.call("GET", f"{org}/secrets")
                await tenant.call("POST", f"{org}/secrets", {"name": [IN_A_BODY], "material": IN_A_BODY})
                await tenant.call("POST", f"{org}/secrets?{IN_A_BODY}={IN_A_BODY}", {IN_A_BODY: IN_A_BODY})
                for name, key in (("lab/main", OF_A_TENANT), ("anthropic/scripted", OF_THE_SERVER)):
                    for echo in echoes(key):
                        model.faults.push(echo)
                        await answered(client, tenant, name)
            process = psutil.Process(server.process.pid)
            lines = [" ".join(one.cmdline()) for one in (process, *process.children(recursive=True))]
            seen = {"answers": "\n".join(tenant.answers), "rows": await everything(dsn), "command lines": str(lines)}
        for file in tmp_path.rglob("*"):
            if file.is_file():
                seen[file.name] = file.read_bytes().decode("latin-1")
    assert sum(entry.outcome == "fault" for entry in model.log.entries) == 2 * len(echoes(""))
    assert "Incorrect API key provided: ***" in seen["rows"]
    assert "step_begun" in seen["server.log"]
    for where, text in seen.items():
        for canary in CANARIES:
            assert canary not in text, where
            assert canary.encode().hex() not in text, where
