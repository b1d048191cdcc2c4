"""The wire itself: headers, addresses, connections, sizes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp.abc import AbstractResolver, ResolveResult

import omnara
from omnara.domain.content import TextBlock
from omnara.providers import ApiKey, Completed, Failed, Limits, ModelGateway, ModelTarget
from omnara.providers.retry import RetryIn, Stop, decide_retry
from tests.support.agent_log import Driver
from tests.support.canned_stream import Canned, canned, chunks

ANTHROPIC, CHAT, RESPONSES = "anthropic_messages", "openai_chat_completions", "openai_responses"
KEY = "sk-key-of-a-tenant"


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


@pytest_asyncio.fixture(loop_scope="session")
async def endpoint() -> AsyncIterator[Canned]:
    async with canned() as endpoint:
        yield endpoint


def target(endpoint: Canned, api_format: str = CHAT, **more: Any) -> ModelTarget:
    fields: dict[str, Any] = {"base_url": endpoint.url + "/base/", "api_key": ApiKey(KEY), **more}
    return ModelTarget(revision_id="mrev_x", provider="canned", slug="m", api_format=api_format, **fields)


async def attempt(gateway: ModelGateway, target: ModelTarget, text: str = "go") -> Completed | Failed:
    driver = Driver(gateway, target)
    driver.log.user(text)
    return await driver.attempt()


@pytest.mark.parametrize(
    ("api_format", "auth", "header", "expected"),
    [
        (CHAT, "bearer_token", None, {"authorization": f"Bearer {KEY}"}),
        (CHAT, "api_key_header", "api-key", {"api-key": KEY}),
        (RESPONSES, "bearer_token", None, {"authorization": f"Bearer {KEY}"}),
        (RESPONSES, "api_key_header", None, {"api-key": KEY}),
        (ANTHROPIC, "bearer_token", None, {"authorization": f"Bearer {KEY}"}),
        (ANTHROPIC, "api_key_header", None, {"x-api-key": KEY}),
        (ANTHROPIC, "api_key_header", "X-Own-Key", {"x-own-key": KEY}),
    ],
)
async def test_the_credential_goes_where_it_belongs_and_the_environment_stays_here(
    endpoint: Canned, monkeypatch: pytest.MonkeyPatch, api_format: str, auth: Any, header: Any, expected: dict[str, str]
) -> None:
    """Source: invariant 7. The official SDKs read all of these; a tenant's endpoint must see none of them."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "operator-secret")
    for name in ("ANTHROPIC_CUSTOM_HEADERS", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "x-operator: operator-secret\nauthorization: Bearer operator-secret")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:1")
    gateway = ModelGateway()
    await attempt(gateway, target(endpoint, api_format, auth_kind=auth, auth_header=header))
    await gateway.close()
    ((headers, _),) = endpoint.requests
    assert "operator-secret" not in json.dumps(headers)
    assert expected.items() <= headers.items()
    assert not {"authorization", "x-api-key", "api-key", "cookie"} & headers.keys() - expected.keys()
    assert not [name for name in headers if name.startswith("x-stainless")]
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"] == f"omnara/{omnara.__version__}"
    assert (headers.get("anthropic-version") is not None) == (api_format == ANTHROPIC)


@pytest.mark.parametrize("name", ["host", "content-length", "bad name", "x\r\ny"])
async def test_a_key_header_that_would_break_the_request_is_refused(
    gateway: ModelGateway, endpoint: Canned, name: str
) -> None:
    outcome = await attempt(gateway, target(endpoint, auth_kind="api_key_header", auth_header=name))
    assert isinstance(outcome, Failed)
    assert outcome.kind == "auth"
    assert endpoint.requests == []


async def test_addresses_are_checked_whether_written_or_resolved(endpoint: Canned) -> None:
    seen: list[tuple[str, str, int]] = []

    def check(host: str, address: str, port: int) -> str | None:
        seen.append((host, address, port))
        return "loopback is not allowed" if host != "allowed.localhost" else None

    gateway = ModelGateway(check_address=check)
    port = int(endpoint.url.rpartition(":")[2])
    for host in ("127.0.0.1", "localhost"):
        outcome = await attempt(gateway, target(endpoint, base_url=f"http://{host}:{port}"))
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.provider_code) == ("invalid_request", "address_blocked")
        assert "loopback is not allowed" in outcome.message
    await gateway.close()
    assert endpoint.requests == []
    assert ("127.0.0.1", "127.0.0.1", port) in seen
    assert {found for _, _, found in seen} == {port}
    assert {address for host, address, _ in seen if host == "localhost"} & {"127.0.0.1", "::1"}


@pytest.mark.parametrize("host", ["xn--", "a" * 64 + ".example"])
async def test_a_host_that_is_no_name_fails_the_attempt_and_nothing_else(endpoint: Canned, host: str) -> None:
    gateway = ModelGateway(check_address=lambda *_: None)
    outcome = await attempt(gateway, target(endpoint, base_url=f"https://{host}"))
    await gateway.close()
    assert isinstance(outcome, Failed)
    assert outcome.kind in ("invalid_request", "transient")


async def test_a_connector_can_be_given(endpoint: Canned) -> None:
    made: list[aiohttp.BaseConnector] = []

    def factory() -> aiohttp.BaseConnector:
        made.append(aiohttp.TCPConnector())
        return made[-1]

    gateway = ModelGateway(connector_factory=factory)
    endpoint.say(*chunks({"content": "hi"}))
    assert isinstance(await attempt(gateway, target(endpoint)), Completed)
    await gateway.close()
    assert len(made) == 1
    assert made[0].closed


@pytest.mark.parametrize("turns", [0, 20])
async def test_connections_are_used_again_even_if_the_body_ends_a_little_later(
    gateway: ModelGateway, endpoint: Canned, turns: int
) -> None:
    endpoint.turns_before_end = turns
    endpoint.say(*chunks({"content": "hi"}))
    for _ in range(3):
        assert isinstance(await attempt(gateway, target(endpoint)), Completed)
    assert len(endpoint.connections) == 1
    assert [headers["accept-encoding"] for headers, _ in endpoint.requests] == ["identity"] * 3


async def test_large_requests_lines_and_answers(gateway: ModelGateway, endpoint: Canned) -> None:
    """Source: field-reports B47: 1.5 MB in one line works, 40 MB fails by name."""
    endpoint.say(*chunks({"content": "x" * 1_500_000}))
    outcome = await attempt(gateway, target(endpoint), "y" * 3_000_000)
    assert isinstance(outcome, Completed)
    assert outcome.blocks == (TextBlock("x" * 1_500_000),)
    assert len(endpoint.requests[0][1]) > 3_000_000
    endpoint.pieces = [b"data: ", b"x" * 40_000_000, b"\n\n"]
    refused = await attempt(gateway, target(endpoint))
    assert isinstance(refused, Failed)
    assert (refused.kind, refused.ambiguous) == ("response_too_large", True)
    assert "an event is larger than" in refused.message
    endpoint.pieces = [b": " + b"x" * 1_000_000 + b"\n"] * 70
    refused = await attempt(gateway, target(endpoint))
    assert isinstance(refused, Failed)
    assert "the response is larger than" in refused.message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"type":"overloaded_error","message":"busy"}}', "provider_unavailable"),
        (b'{"choices":[]}', "unknown"),
        (b"<html>" + b"x" * 200_000, "unknown"),
    ],
)
async def test_a_success_that_is_no_stream(gateway: ModelGateway, endpoint: Canned, body: bytes, kind: str) -> None:
    endpoint.headers = {"content-type": "application/json"}
    endpoint.pieces = [body]
    outcome = await attempt(gateway, target(endpoint))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.status) == (kind, 200)
    assert len(outcome.message) <= 2000


@pytest.mark.parametrize("event", [b"{", b"[1]", b'{"choices":7}', b"[" * 5000, b'{"choices":[{"delta":"x"}]}'])
async def test_an_event_that_is_none_is_tried_again(gateway: ModelGateway, endpoint: Canned, event: bytes) -> None:
    endpoint.say(event, "[DONE]")
    outcome = await attempt(gateway, target(endpoint))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == ("transient", True)


class Nameless(AbstractResolver):
    """A name server that does not answer."""

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        await asyncio.Event().wait()
        return []

    async def close(self) -> None:
        pass


async def test_connecting_has_a_limit_of_its_own(endpoint: Canned) -> None:
    gateway = ModelGateway(connector_factory=lambda: aiohttp.TCPConnector(resolver=Nameless()))
    limits = Limits(connect=0.1)
    outcome = await attempt(gateway, target(endpoint, base_url="http://nowhere.invalid", limits=limits))
    await gateway.close()
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == ("transient", False)
    assert "could not connect" in outcome.message


CREDENTIALS = {"authorization", "x-api-key", "api-key"}
SDK_CLIENTS = {
    # What to give the official client, and in which headers its releases so far put it.
    "anthropic key": (ANTHROPIC, "api_key_header", {"api_key": KEY}, ({"x-api-key"}, {"authorization"})),
    "anthropic token": (ANTHROPIC, "bearer_token", {"auth_token": KEY}, ({"authorization"},)),
    "openai": (CHAT, "bearer_token", {"api_key": KEY}, ({"authorization"},)),
    "openai responses": (RESPONSES, "bearer_token", {"api_key": KEY}, ({"authorization"},)),
}
REVIEWED_VERSIONS = {None, "2023-06-01", "2026-10-21"}
"""Whatever else a release of the SDK sends has to be read about first; see `anthropic_messages.API_VERSION`."""


@pytest.mark.parametrize("which", SDK_CLIENTS)
async def test_the_headers_are_those_of_the_official_clients_as_far_as_is_known(
    gateway: ModelGateway, endpoint: Canned, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """So that a release of theirs that asks for another header, version or credential is noticed."""
    for name in [name for name in os.environ if name.startswith(("ANTHROPIC_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    api_format, auth, key, known = SDK_CLIENTS[which]
    await attempt(gateway, target(endpoint, api_format, auth_kind=auth))
    await _ask_officially(api_format, {**key, "base_url": endpoint.url, "max_retries": 0})
    (ours, sent), (theirs, _) = endpoint.requests
    assert json.loads(sent)["model"] == "m"
    assert ours["content-type"] == theirs["content-type"]
    assert theirs.get("anthropic-version") in REVIEWED_VERSIONS
    for family in ("anthropic-", "openai-"):
        assert {name for name in ours if name.startswith(family)} == {
            name for name in theirs if name.startswith(family)
        }
    assert CREDENTIALS & theirs.keys() in known
    assert CREDENTIALS & ours.keys() in known
    if CREDENTIALS & ours.keys() == CREDENTIALS & theirs.keys():
        assert {ours[name] for name in CREDENTIALS & ours.keys()} == {
            theirs[name] for name in CREDENTIALS & ours.keys()
        }


async def _ask_officially(api_format: str, options: dict[str, Any]) -> None:
    """Send what a model call sends through the provider's own client; the answer is an empty stream."""
    import anthropic
    import openai

    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    if api_format == ANTHROPIC:
        async with (
            anthropic.AsyncAnthropic(**options) as client,
            client.messages.stream(max_tokens=10, **asked) as stream,
        ):
            assert [event async for event in stream] == []
    elif api_format == RESPONSES:
        async with openai.AsyncOpenAI(**options) as client_of_responses:
            events = await client_of_responses.responses.create(stream=True, model="m", input="go", store=False)
            assert [event async for event in events] == []
    else:
        async with openai.AsyncOpenAI(**options) as other:
            chat = await other.chat.completions.create(stream=True, **asked)
            assert [chunk async for chunk in chat] == []


def test_neither_the_server_nor_a_model_call_imports_an_sdk() -> None:
    """They take 1.8 s of CPU and 60 MB, which no process that serves has to spend."""
    code = """
import asyncio, sys
import omnara.app.serve
from omnara.domain.context import ContextState
from omnara.providers import *
from omnara.ids import new_uuid
async def main():
    gateway = ModelGateway()
    for name in ("anthropic_messages", "openai_chat_completions", "openai_responses"):
        target = ModelTarget(revision_id="r", provider="p", slug="m", api_format=name, api_key=ApiKey("k"),
                             base_url="http://127.0.0.1:1")
        context = ContextState()
        call = ModelCall(target=target, system="", tools=(), context=context, history=RenderedHistory(),
                         new_call_id=lambda: (new_uuid(), "c"))
        assert "could not connect" in (await gateway.call(call)).message
    await gateway.close()
asyncio.run(main())
print(sorted({"anthropic", "openai", "httpx", "httpx2", "pydantic"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]", done.stderr


async def test_a_format_without_adapter_is_a_failure_like_any_other(gateway: ModelGateway, endpoint: Canned) -> None:
    outcome = await attempt(gateway, target(endpoint, "smoke_signals"))
    assert isinstance(outcome, Failed)
    assert outcome.kind == "invalid_request"


def test_a_key_does_not_show_itself() -> None:
    key = ApiKey(KEY)
    assert KEY not in f"{key!r} {key}"
    assert KEY not in repr(ModelTarget(revision_id="r", provider="p", api_format=CHAT, slug="s", api_key=key))
    assert key == ApiKey(KEY)
    assert len({key, ApiKey(KEY), ApiKey("other")}) == 2


LARGE = "x" * 500_000
SAID = {
    ANTHROPIC: (
        {"type": "message_start", "message": {"usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        *[
            {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": LARGE}}
            for _ in range(40)
        ],
    ),
    CHAT: (
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "look"}}]}}]},
        *[
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": LARGE}}]}}]}
            for _ in range(40)
        ],
    ),
    RESPONSES: tuple(
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "item_id": "m", "delta": LARGE}
        for _ in range(40)
    ),
}


@pytest.mark.parametrize("api_format", SAID)
async def test_an_answer_that_nobody_could_keep_is_not_asked_for_again(
    gateway: ModelGateway, endpoint: Canned, api_format: str
) -> None:
    endpoint.say(*SAID[api_format])
    failed = await attempt(gateway, target(endpoint, api_format=api_format))
    assert isinstance(failed, Failed)
    assert failed.kind == "response_too_large"
    assert failed.message.startswith("response_too_large: the answer is larger than 16777216 bytes")
    assert decide_retry(failed, 1, "call") == Stop()


async def test_answers_of_the_whole_process_have_a_bound(endpoint: Canned) -> None:
    """The one that takes most is cut, may be asked for again, and gives back what it held; the others go on."""
    gateway = ModelGateway(answers_bytes=2_000_000)
    endpoint.say(*chunks({"content": "small"}))
    small = endpoint.pieces
    endpoint.say(*chunks(*[{"content": LARGE} for _ in range(5)]))
    large, begun, release = endpoint.pieces, asyncio.Event(), asyncio.Event()

    async def pieces(request: bytes) -> AsyncIterator[bytes]:
        if b"large" in request:
            for piece in large:
                yield piece
            return
        yield small[0]
        begun.set()
        await release.wait()
        for piece in small[1:]:
            yield piece

    endpoint.script = pieces
    slow = asyncio.create_task(attempt(gateway, target(endpoint), "small"))
    async with asyncio.timeout(20):
        await begun.wait()
    for _ in range(2):
        cut = await attempt(gateway, target(endpoint), "large")
        assert isinstance(cut, Failed)
        assert (cut.kind, cut.ambiguous) == ("transient", True)
        assert "take more than 2000000 bytes" in cut.message
        assert isinstance(decide_retry(cut, 1, "call"), RetryIn)
    release.set()
    done = await slow
    assert isinstance(done, Completed)
    assert done.blocks == (TextBlock("small"),)
    large = large[:3] + small[-2:]
    fits = await attempt(gateway, target(endpoint), "large")
    assert isinstance(fits, Completed)
    await gateway.close()
