"""Putting a process together: the key ring's file, the rule for addresses, the listeners' failures."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import aiohttp
import pytest

from omnara.api.ops import Readiness
from omnara.app.addresses import address_check
from omnara.app.garbage import THRESHOLDS, leave_out_what_is_there, rare_full_collections
from omnara.app.keyring import load_ring, write_private
from omnara.app.listeners import ops_listener
from omnara.engine.bootstrap import environment_endpoints
from omnara.errors import ConfigurationError
from omnara.metrics import Metrics
from omnara.settings import Address, load
from omnara.tools.allow_list import parse_allow_list


def test_a_private_file_is_for_its_owner_only_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_private(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(path, "two")
    assert path.read_text() == "one"
    assert [found.name for found in tmp_path.iterdir()] == ["secret"]


def test_the_embedded_database_gets_one_ring_for_good(tmp_path: Path) -> None:
    settings = load({"OMNARA_DATA_DIR": str(tmp_path)})
    first = load_ring(settings, embedded=True)
    assert load_ring(settings, embedded=True).serialise() == first.serialise()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_your_own_database_needs_your_own_ring(tmp_path: Path) -> None:
    settings = load({"OMNARA_DATA_DIR": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="openssl rand"):
        load_ring(settings, embedded=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("allowed", "host", "ip", "port", "passes"),
    [
        ("", "api.example.com", "93.184.216.34", 443, True),
        ("", "localhost", "127.0.0.1", 80, False),
        ("", "127.0.0.1", "127.0.0.1", 80, False),
        ("", "metadata", "169.254.169.254", 80, False),
        ("", "six", "::1", 80, False),
        ("", "mapped", "::ffff:10.0.0.1", 80, False),
        ("", "odd", "not an address", 80, False),
        ("127.0.0.1:9000", "127.0.0.1", "127.0.0.1", 9000, True),
        ("127.0.0.1:9000", "127.0.0.1", "127.0.0.1", 9001, False),
        ("127.0.0.1:9000", "localhost", "127.0.0.1", 9000, True),
        ("127.0.0.1:9000", "localhost", "127.0.0.1", 5432, False),
        ("127.0.0.1:9000", "127.0.0.2", "127.0.0.2", 9000, False),
        ("models.internal", "Models.Internal", "10.0.0.5", 1, True),
        ("models.internal:8000", "Models.Internal", "10.0.0.5", 8000, True),
        ("models.internal:8000", "Models.Internal", "10.0.0.5", 22, False),
        ("[::1]:9000", "six", "::1", 9000, True),
        ("[::1]:9000", "six", "::1", 9001, False),
        ("10.0.0.0/24", "anything", "10.0.0.9", 80, True),
        ("10.0.0.0/24", "anything", "10.0.1.9", 80, False),
    ],
)
def test_which_addresses_a_model_call_may_dial(allowed: str, host: str, ip: str, port: int, passes: bool) -> None:
    reason = address_check(parse_allow_list(allowed))(host, ip, port)
    assert (reason is None) is passes


@pytest.mark.parametrize(
    ("base_url", "allowed", "passes"),
    [
        (None, "", True),
        ("https://models.example.com/v1", "", True),
        ("http://models.example.com/v1", "", False),
        ("http://127.0.0.1:8090", "", False),
        ("https://10.1.2.3", "", False),
        ("https://user:secret@models.example.com", "", False),
        ("not a url", "", False),
        ("http://127.0.0.1:8090", "127.0.0.1:8090", True),
        ("http://127.0.0.1:8091", "127.0.0.1:8090", False),
        ("http://localhost:8090/", "localhost", True),
        ("http://10.1.2.3", "10.0.0.0/8", True),
    ],
)
@pytest.mark.parametrize("provider", ["ANTHROPIC", "OPENAI"])
def test_endpoints_of_the_environment_are_checked_before_anything_starts(
    provider: str, base_url: str | None, allowed: str, passes: bool
) -> None:
    values = {f"{provider}_API_KEY": "k", "OMNARA_ALLOWED_PRIVATE_HOSTS": allowed}
    settings = load(values | ({} if base_url is None else {f"{provider}_BASE_URL": base_url}))
    if passes:
        [given] = environment_endpoints(settings)
        assert given.base_url.startswith(base_url.rstrip("/") if base_url else "https://api.")
    else:
        with pytest.raises(ConfigurationError, match=f"{provider}_BASE_URL.*OMNARA_ALLOWED_PRIVATE_HOSTS") as caught:
            environment_endpoints(settings)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "spoken"),
    [
        ({}, "openai_responses"),
        ({"OPENAI_BASE_URL": "https://api.openai.com/v1/"}, "openai_responses"),
        ({"OPENAI_BASE_URL": "https://models.example/v1"}, "openai_chat_completions"),
        ({"OPENAI_BASE_URL": "https://models.example/v1", "OPENAI_API_FORMAT": "responses"}, "openai_responses"),
        ({"OPENAI_API_FORMAT": "chat-completions"}, "openai_chat_completions"),
    ],
)
def test_an_endpoint_that_imitates_speaks_chat_completions(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], spoken: str
) -> None:
    monkeypatch.setattr("omnara.engine.bootstrap.check_endpoint", lambda *_: None)
    [given] = environment_endpoints(load({"OPENAI_API_KEY": "k", **values}))
    assert given.provider.api_format == spoken
    assert given.provider.request_path == {"openai_responses": "/responses"}.get(spoken, "/chat/completions")


def test_an_endpoint_without_a_key_is_nobodys() -> None:
    assert environment_endpoints(load({"OPENAI_BASE_URL": "http://127.0.0.1:1"})) == []


async def test_the_ops_listener_answers_while_nothing_is_ready_and_refuses_a_taken_port() -> None:
    async def check() -> Readiness:
        return Readiness(False, "starting")

    metrics = Metrics.create()
    listener = ops_listener(Address("127.0.0.1", 0), metrics, check)
    await listener.start()
    try:
        ((host, port),) = listener.addresses
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            async with session.get("/healthz") as alive:
                assert alive.status == 200
            async with session.get("/readyz") as ready:
                assert (ready.status, (await ready.json())["reason"]) == (503, "starting")
            async with session.get("/metrics") as exposed:
                assert "omnara_ready_agents" in await exposed.text()
        second = ops_listener(Address(host, port), metrics, check)
        with pytest.raises(ConfigurationError, match="OMNARA_OPS_LISTEN"):
            await second.start()
        await second.stop()
    finally:
        await asyncio.wait_for(listener.stop(), 20)


def test_full_collections_are_rare_while_a_server_runs_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with rare_full_collections():
        assert gc.get_threshold() == THRESHOLDS
        leave_out_what_is_there()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
