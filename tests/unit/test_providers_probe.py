"""Asking providers for their models through the official clients: what leaves, what comes back, what may go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from omnara.providers import ApiKey
from omnara.providers.probe import MAX_SLUGS, Catalogue, ProbeFailed, ProbeTarget, probe_models
from omnara.testing import ModelServer, ModelSpec, Strictness
from omnara.testing.script import fixed

ANTHROPIC, CHAT, RESPONSES = "anthropic_messages", "openai_chat_completions", "openai_responses"
FORMATS = (ANTHROPIC, CHAT, RESPONSES)
KEY = "sk-key-of-a-tenant"
AUTH: dict[str, tuple[Any, dict[str, str]]] = {
    ANTHROPIC: ("api_key_header", {"x-api-key": KEY}),
    CHAT: ("bearer_token", {"authorization": f"Bearer {KEY}"}),
    RESPONSES: ("bearer_token", {"authorization": f"Bearer {KEY}"}),
}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def target(base_url: str, api_format: str, key: str | None = KEY) -> ProbeTarget:
    return ProbeTarget(
        api_format=api_format,
        base_url=base_url,
        auth_kind=AUTH[api_format][0],
        api_key=None if key is None else ApiKey(key),
    )


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """An endpoint with this answer to everything, and the requests that it got."""
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def entry(slug: str) -> dict[str, Any]:
    """A model as both formats can read it, with as little as imitators send."""
    return {"id": slug}


async def of(api_format: str, answer: Answer, **options: Any) -> ProbeFailed | Catalogue:
    async with endpoint(answer) as (url, seen):
        found = await probe_models(target(url + "/v1", api_format), **options)
        assert len(seen) <= 1, "nothing is tried twice"
        return found


def saying(status: int, body: object = None, **headers: str) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return answer


@pytest.mark.parametrize("api_format", FORMATS)
async def test_the_model_server_is_asked_for_its_catalogue(api_format: str) -> None:
    models = {"small-1": ModelSpec(), "large-2": ModelSpec()}
    async with ModelServer(fixed("x"), strict=Strictness(models=models)) as server:
        found = await probe_models(target(f"{server.url}/v1/", api_format))
    assert isinstance(found, Catalogue)
    assert (found.slugs, found.complete) == (("small-1", "large-2"), True)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_address_and_credential_are_the_stored_ones_whatever_the_environment_says(
    api_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: invariant 7."""
    for name in (
        "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE", "OPENAI_API_KEY", "OPENAI_ADMIN_KEY",
        "OPENAI_ORG_ID", "OPENAI_PROJECT_ID",
    ):  # fmt: skip
        monkeypatch.setenv(name, "operator-secret")
    for name in ("ANTHROPIC_CUSTOM_HEADERS", "OPENAI_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "x-operator: operator-secret\nauthorization: Bearer operator-secret")
    for name in ("ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with endpoint(saying(200, {"data": [entry("m")]})) as (url, seen):
        found = await probe_models(target(url + "/gateway", api_format))
    assert isinstance(found, Catalogue)
    assert found.slugs == ("m",)
    [request] = seen
    assert (request.method, request.path) == ("GET", "/gateway/models")
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert "operator-secret" not in json.dumps(headers)
    assert {name: headers[name] for name in ("authorization", "x-api-key") if name in headers} == AUTH[api_format][1]
    assert not [name for name in headers if name.startswith("x-stainless")]
    assert ("anthropic-version" in headers) is (api_format == ANTHROPIC)


async def test_every_page_is_read_and_no_end_of_them() -> None:
    def page(request: web.Request, *, last: int) -> web.Response:
        begin = int(request.query.get("after_id", "0"))
        size = int(request.query["limit"])
        more = begin + size < last
        data = [entry(str(number)) for number in range(begin + 1, min(begin + size, last) + 1)]
        return web.json_response({"data": data, "has_more": more, "last_id": data[-1]["id"]})

    async def two(request: web.Request) -> web.StreamResponse:
        return page(request, last=1_500)

    async def endless(request: web.Request) -> web.StreamResponse:
        return page(request, last=10**9)

    async with endpoint(two) as (url, seen):
        whole = await probe_models(target(url + "/v1", ANTHROPIC))
        assert len(seen) == 2
    assert isinstance(whole, Catalogue)
    assert (len(whole.slugs), whole.complete) == (1_500, True)
    async with endpoint(endless) as (url, _):
        cut = await probe_models(target(url + "/v1", ANTHROPIC))
    assert isinstance(cut, Catalogue)
    assert (len(cut.slugs), cut.complete) == (MAX_SLUGS, False)


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (401, "credential", "does not accept the key"),
        (403, "credential", "may not list models"),
        (404, "status", "no list of models"),
        (429, "status", "slow down"),
        (500, "status", "problem of its own"),
        (529, "status", "problem of its own"),
        (418, "status", "refused (418)"),
    ],
)
async def test_a_refusal_is_a_sentence_by_its_class(api_format: str, status: int, reason: str, says: str) -> None:
    body = {"type": "error", "error": {"type": "x", "message": f"no, {KEY}"}}
    found = await of(api_format, saying(status, body))
    assert isinstance(found, ProbeFailed)
    assert (found.reason, found.status) == (reason, status)
    assert says in found.message
    assert KEY not in found.message


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"type": "error", "error": {"type": "some_error", "message": "the region is closed"}}, "the region is closed"),
        ({"error": {"type": "billing_error"}}, "billing_error"),
        ({"error": "closed on Sundays"}, "closed on Sundays"),
        ({"message": "no such plan"}, "no such plan"),
        ({"error": {"message": {"nested": 1}}}, "it does not say why"),
        ([1, 2], "it does not say why"),
        ({}, "it does not say why"),
    ],
)  # fmt: skip
async def test_a_refusal_says_what_the_provider_says_in_words(api_format: str, body: object, says: str) -> None:
    found = await of(api_format, saying(418, body))
    assert found == ProbeFailed("status", f"the endpoint refused (418): {says}", 418)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_redirect_is_not_followed(api_format: str) -> None:
    found = await of(api_format, saying(302, location="/elsewhere"))
    assert isinstance(found, ProbeFailed)
    assert (found.reason, found.status) == ("status", 302)
    assert "redirect" in found.message


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("body", [[], [1], {"data": None}, {"data": [1]}, {"data": [{"id": 7}]}, "text", None, {}])
async def test_a_success_that_is_no_catalogue(api_format: str, body: object) -> None:
    found = await of(api_format, saying(200, body))
    assert found == ProbeFailed("answer", "the endpoint's answer is not a list of models")


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("odd", ['"created": 1' + "0" * 400, '"created_at": "0001-01-01T00:00:00"', '"created": 1e999'])
async def test_an_age_that_is_none_hides_no_model(api_format: str, odd: str) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=f'{{"data": [{{"id": "m", {odd}}}], "has_more": false}}')

    found = await of(api_format, answer)
    assert isinstance(found, Catalogue)
    assert found.slugs == ("m",)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_catalogue_that_the_client_cannot_read(api_format: str) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text=f'{{"data": [{{"id": "m", "created": 1{"0" * 6000}}}]}}')

    assert await of(api_format, answer) == ProbeFailed("answer", "the endpoint's answer cannot be read")


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("host", ["xn--", "a" * 64 + ".example"])
async def test_a_host_that_is_no_name(api_format: str, host: str) -> None:
    found = await probe_models(target(f"https://{host}/v1", api_format), check_address=lambda *_: None)
    assert isinstance(found, ProbeFailed)
    assert found.reason in ("address", "connection")


@pytest.mark.parametrize("api_format", FORMATS)
async def test_an_answer_without_end(api_format: str) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        for _ in range(12):
            await response.write(b" " * 1024 * 1024)
        return response

    found = await of(api_format, flood)
    assert isinstance(found, ProbeFailed)
    assert (found.reason, "larger than" in found.message) == ("answer", True)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_silence_has_an_end(api_format: str) -> None:
    never = asyncio.Event()

    async def silent(_request: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    found = await of(api_format, silent, timeout_s=0.2)
    never.set()
    assert found == ProbeFailed("timeout", "the endpoint did not answer within 0.2 s")


@pytest.mark.parametrize("api_format", FORMATS)
async def test_nobody_there(api_format: str) -> None:
    async with endpoint(saying(200)) as (url, _):
        pass
    found = await probe_models(target(url + "/v1", api_format))
    assert isinstance(found, ProbeFailed)
    assert (found.reason, "could not connect" in found.message) == ("connection", True)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_addresses_are_checked_as_for_model_calls(api_format: str) -> None:
    seen: list[tuple[str, int]] = []

    def check(host: str, _address: str, port: int) -> str | None:
        seen.append((host, port))
        return "private"

    async with endpoint(saying(200, {"data": []})) as (url, asked):
        port = int(url.rpartition(":")[2])
        for host in ("127.0.0.1", "localhost"):
            found = await probe_models(target(f"http://{host}:{port}/v1", api_format), check_address=check)
            assert found == ProbeFailed("address", "the endpoint's address is not allowed: private")
    assert asked == []
    assert set(seen) == {("127.0.0.1", port), ("localhost", port)}


async def test_what_cannot_be_asked() -> None:
    for key in (None, "two words"):
        found = await probe_models(target("http://127.0.0.1:1", CHAT, key))
        assert isinstance(found, ProbeFailed)
        assert found.reason == "credential"
    other = ProbeTarget(api_format="in_process", base_url="", auth_kind="bearer_token", api_key=ApiKey(KEY))
    assert isinstance(await probe_models(other), ProbeFailed)
    found = await probe_models(target("ftp://127.0.0.1", CHAT))
    assert found == ProbeFailed("address", "the endpoint's URL is not usable")
