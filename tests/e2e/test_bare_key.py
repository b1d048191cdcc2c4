"""From a bare key to a running agent through HTTP alone: a real server process that knows no provider of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from omnara.clock import Deadline
from omnara.testing import ModelServer, ModelSpec, Strictness, say
from omnara.testing.conversation import Conversation
from tests.e2e.served import served

KEY = "sk-tenant-key-nobody-else-has"
NEXT_KEY = "sk-tenant-key-after-rotation"
FORMATS = {
    "anthropic-messages": "/v1",
    "openai-chat-completions": "/v1",
    "openai-responses": "/v1",
}


class Caller:
    """One key and nothing else."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def call(self, method: str, path: str, status: int, body: Any = None) -> Any:
        """Send a request that must be answered with `status`; return the JSON of the answer."""
        options = {} if body is None else {"json": body}
        async with self._session.request(
            method, f"{self._url}/api/v1{path}", headers=self._headers, **options
        ) as answer:
            text = await answer.text()
            assert answer.status == status, f"{method} {path}: {answer.status} {text}"
            return msgspec.json.decode(text) if text else None

    async def outputs(self, agent: str, count: int) -> list[str]:
        """Read the agent's stream until it has said `count` things; return them."""
        found: list[str] = []
        async with self._session.get(f"{self._url}/api/v1{agent}/events/stream", headers=self._headers) as stream:
            async for line in stream.content:
                if line.startswith(b"data: "):
                    event = msgspec.json.decode(line[6:])
                    if event.get("event_kind") == "model_output":
                        found.append("".join(block.get("text", "") for block in event["content_blocks"]))
                if len(found) == count:
                    return found
        raise AssertionError(f"the stream ended after {found}")


@contextlib.asynccontextmanager
async def caller(dsn: str, directory: Path, model: ModelServer) -> AsyncIterator[Caller]:
    """A server without provider keys, and a caller with its first key."""
    allowed = {"OMNARA_ALLOWED_PRIVATE_HOSTS": model.url.removeprefix("http://")}
    async with (
        served(dsn, directory, None, allowed) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        yield Caller(session, server.url, server.key)


def polite(conversation: Conversation) -> Any:
    return say(f"Answer {conversation.turn + 1}.")


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_key_is_enough(database: str, tmp_path: Path, api_format: str) -> None:
    strict = Strictness(keys=frozenset({KEY}), models={"scripted-1": ModelSpec()})
    async with ModelServer(polite, strict=strict) as model, caller(database, tmp_path, model) as me:
        org = (await me.call("POST", "/orgs", 201, {"name": "Acme"}))["org"]["id"]
        project = (await me.call("POST", f"/orgs/{org}/projects", 201, {"name": "Support"}))["id"]
        secret = await me.call(
            "POST",
            f"/orgs/{org}/secrets",
            201,
            {"owner": {"kind": "org"}, "name": "model key", "material": {"kind": "generic", "value": KEY}},
        )
        made = await me.call(
            "POST",
            f"/orgs/{org}/model-provider-configs",
            201,
            {
                "name": "lab",
                "api_format": api_format,
                "base_url": model.url + FORMATS[api_format],
                "credential_secret_id": secret["id"],
            },
        )
        assert made["model_catalog"]["status"] == "ok", made
        [offered] = made["model_catalog"]["models"]
        provider = f"/orgs/{org}/model-provider-configs/{made['config']['id']}"
        configured = await me.call(
            "POST",
            f"{provider}/models",
            201,
            {"name": "main", "provider_model_slug": offered["slug"], "context_window_tokens": 100_000},
        )
        scope = f"/orgs/{org}/projects/{project}"
        source = "instruction: Be brief.\nmodel:\n  provider_config: lab\n  name: main\n"
        config = {"source": source, "source_format": "yaml"}
        await me.call("POST", f"{scope}/agent-configs", 400, config)
        grant = await me.call("POST", f"{scope}/model-grants", 201, {"configured_model_id": configured["id"]})
        config_id = (await me.call("POST", f"{scope}/agent-configs", 201, config))["id"]
        launched = await me.call("POST", f"{scope}/agents", 201, {"config": config_id, "name": "First"})
        agent = f"{scope}/agents/{launched['agent']['id']}"
        message = {"content_blocks": [{"type": "text", "text": "Hello"}]}
        await me.call("POST", f"{agent}/inputs", 201, message)
        assert await me.outputs(agent, 1) == ["Answer 1."]

        # A rotated key is used within a second, whatever the provider thinks of the old one meanwhile.
        version = {"material": {"kind": "generic", "value": NEXT_KEY}}
        await me.call("POST", f"/orgs/{org}/secrets/{secret['id']}/versions", 200, version)
        model.strictness = msgspec.structs.replace(strict, keys=frozenset({NEXT_KEY}))
        await me.call("DELETE", f"/orgs/{org}/secrets/{secret['id']}", 409)
        deadline, count, said = Deadline(5), 1, ""
        while not said.startswith("Answer"):
            assert not deadline.passed, said
            await me.call("POST", f"{agent}/inputs", 201, message)
            count += 1
            said = (await me.outputs(agent, count))[-1]

        # Everything is taken down in the contract's order.
        await me.call("DELETE", f"{provider}/models/{configured['id']}", 409)
        await me.call("DELETE", provider, 409)
        await me.call("DELETE", f"{scope}/model-grants/{grant['grant']['id']}", 204)
        await me.call("DELETE", f"{provider}/models/{configured['id']}", 204)
        await me.call("DELETE", provider, 204)
        await me.call("DELETE", f"/orgs/{org}/secrets/{secret['id']}", 204)
        await me.call("DELETE", f"/orgs/{org}/projects/{project}", 204)
        await me.call("DELETE", f"/orgs/{org}", 204)
        await me.call("GET", f"{agent}", 404)
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert KEY not in log
    assert NEXT_KEY not in log
