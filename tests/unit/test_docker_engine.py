"""An engine that cannot be used is told as such, with what to do about it, whatever answers or does not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from omnara.machines.docker.engine import Engine
from omnara.machines.providers.protocol import ProviderUnavailable


@pytest_asyncio.fixture
async def answering() -> AsyncIterator[tuple[str, list[tuple[int, str]]]]:
    """Something that answers every request with the one thing in the list; and where it is."""
    answers: list[tuple[int, str]] = []

    async def answer(_: web.Request) -> web.Response:
        status, text = answers[-1]
        return web.Response(status=status, text=text, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"tcp://127.0.0.1:{runner.addresses[0][1]}", answers
    finally:
        await runner.cleanup()


async def _why(endpoint: str | None) -> str:
    engine = Engine(endpoint)
    try:
        with pytest.raises(ProviderUnavailable) as raised:
            await engine.identity()
    finally:
        await engine.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((400, json.dumps({"message": "Client sent an HTTP request to an HTTPS server."})), "set DOCKER_TLS_VERIFY=1"),
        ((404, "{}"), "does not say who it is"),
        ((200, "[]"), "no Docker engine"),
        ((200, '{"ApiVersion": "1.41"}'), "without an id"),
        ((200, '{"ApiVersion": "1.41", "ID": "a", "Components": [{"Name": "Podman Engine"}]}'), "this is Podman"),
        ((503, '{"message": "later"}'), "later"),
    ],
)
async def test_what_is_no_usable_engine(
    answering: tuple[str, list[tuple[int, str]]], answer: tuple[int, str], told: str
) -> None:
    endpoint, answers = answering
    answers.append(answer)
    assert told in await _why(endpoint)


async def test_certificates_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.delenv("DOCKER_CERT_PATH", raising=False)
    assert "DOCKER_CERT_PATH to where ca.pem" in await _why("tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    assert "certificates cannot be read" in await _why("tcp://127.0.0.1:1")


async def test_what_the_client_is_set_up_for_and_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "one that does not exist")
    assert "there is no Docker engine" in await _why(None)
    assert "there is no Docker engine" in await _why("127.0.0.1:2375")


async def test_what_an_engine_cannot_limit_is_known(answering: tuple[str, list[tuple[int, str]]]) -> None:
    endpoint, answers = answering
    rootless = {"MemoryLimit": False, "PidsLimit": False, "CpuCfsQuota": True}
    answers.append((200, json.dumps({"ApiVersion": "1.41", "ID": "a", **rootless})))
    engine = Engine(endpoint)
    try:
        assert await engine.identity() == "a"
        assert engine.unlimited == ("memory", "processes")
        answers.append((200, json.dumps({"ApiVersion": "1.41", "ID": "a", "MemoryLimit": True})))
        await engine.identity()
        assert engine.unlimited == ()
    finally:
        await engine.close()
