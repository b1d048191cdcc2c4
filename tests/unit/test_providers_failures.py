"""Every way in which a provider fails, named as the engine needs it. Source: engine.md §5, field-reports B43 to B45."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omnara.domain.content import TextBlock
from omnara.domain.stream import ErrorDelta
from omnara.providers import ApiKey, Completed, ErrorKind, Failed, Limits, ModelGateway, ModelTarget
from omnara.testing import (
    Answer,
    Call,
    Content,
    Cut,
    Drip,
    Fault,
    HttpError,
    ModelServer,
    NoHeaders,
    Silence,
    StreamError,
    Text,
    Thinking,
    Usage,
    plan,
    say,
)
from tests.support.agent_log import Driver

ANTHROPIC, CHAT, RESPONSES = "anthropic_messages", "openai_chat_completions", "openai_responses"
FORMATS = (ANTHROPIC, CHAT, RESPONSES)
KEY = "sk-very-secret-key-of-a-tenant"
BUSY = Answer(
    blocks=(Thinking("First I look."), Text("I read it all now."), Call("look", {"path": "a.txt", "lines": [1, 2]})),
    usage=Usage(input=10, output=5),
)
PATIENT = Limits(connect=30.0, first_byte=30.0, idle=30.0, total=60.0)
"""No attempt comes near these, unless it is about a limit, and then it has its own."""


@pytest_asyncio.fixture(loop_scope="session")
async def gateway() -> AsyncIterator[ModelGateway]:
    gateway = ModelGateway()
    yield gateway
    await gateway.close()


def target(url: str, api_format: str, limits: Limits = PATIENT) -> ModelTarget:
    return ModelTarget(
        revision_id="mrev_x",
        provider="scripted",
        slug="scripted",
        api_format=api_format,
        base_url=url + "/v1",
        api_key=ApiKey(KEY),
        limits=limits,
    )


async def outcome_of(
    gateway: ModelGateway, api_format: str, fault: Fault, answer: Answer = BUSY
) -> tuple[Completed | Failed, Driver]:
    """One attempt against a server that fails in this way."""
    async with ModelServer(plan(answer)) as server:
        server.faults.push(fault)
        driver = Driver(gateway, target(server.url, api_format))
        driver.log.user("go")
        return await driver.attempt(), driver


def too_long(status: int) -> HttpError:
    return HttpError(status, message="Your input is too long: it exceeds the context window of this model")


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (HttpError(400), "invalid_request"),
        (HttpError(401), "auth"),
        (HttpError(402), "billing_account"),
        (HttpError(403), None),
        (HttpError(403, error_type="odd", code="odd"), "auth"),
        (HttpError(403, error_type="odd", code="odd", message="flagged by moderation"), "invalid_request"),
        (HttpError(404), "invalid_request"),
        (HttpError(408, error_type="api_error", code="odd"), "transient"),
        (HttpError(409, error_type="api_error", code="odd"), "transient"),
        (HttpError(413), "payload_too_large"),
        (HttpError(422, error_type="invalid_request_error", code="odd"), "invalid_request"),
        (HttpError(429), "rate_limit"),
        (HttpError(429, error_type="insufficient_quota", code="insufficient_quota"), "billing_account"),
        (HttpError(500), "provider_unavailable"),
        (HttpError(503), "provider_unavailable"),
        (HttpError(529), "provider_unavailable"),
        (HttpError(504, body="<html>Gateway Timeout</html>"), None),
        (HttpError(302, headers={"location": "http://127.0.0.1:1/"}), "invalid_request"),
        (too_long(400), "context_window"),
        (too_long(502), "context_window"),
    ],
)
async def test_statuses_and_codes(
    gateway: ModelGateway, api_format: str, fault: HttpError, kind: ErrorKind | None
) -> None:
    outcome, driver = await outcome_of(gateway, api_format, fault)
    assert isinstance(outcome, Failed)
    assert outcome.status == fault.status
    assert not outcome.ambiguous
    if kind is not None:
        assert outcome.kind == kind
    assert outcome.message
    assert driver.deltas == [ErrorDelta(driver.deltas[0].error)]  # type: ignore[union-attr]


@pytest.mark.parametrize("api_format", FORMATS)
async def test_what_the_provider_asks_for_is_handed_on(gateway: ModelGateway, api_format: str) -> None:
    wait = HttpError(429, headers={"retry-after-ms": "1500", "retry-after": "9", "x-should-retry": "false"})
    outcome, _ = await outcome_of(gateway, api_format, wait)
    assert isinstance(outcome, Failed)
    assert (outcome.retry_after_s, outcome.should_retry) == (1.5, False)
    nonsense, _ = await outcome_of(gateway, api_format, HttpError(429, headers={"retry-after": "soon"}))
    assert isinstance(nonsense, Failed)
    assert (nonsense.retry_after_s, nonsense.should_retry) == (None, None)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_messages_are_bounded_and_never_show_the_key(gateway: ModelGateway, api_format: str) -> None:
    fault = HttpError(401, message=f"Incorrect API key provided: {KEY}\0 " + "é" * 3000)
    outcome, _ = await outcome_of(gateway, api_format, fault)
    assert isinstance(outcome, Failed)
    assert KEY not in outcome.message
    assert "\0" not in outcome.message
    assert "provided: ***" in outcome.message
    assert 1990 <= len(outcome.message.encode()) <= 2000


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("at", ["first_delta", "mid_text", "mid_arguments"])
async def test_an_error_inside_the_stream_is_classified_by_its_type(
    gateway: ModelGateway, api_format: str, at: Any
) -> None:
    """Source: field-reports B43."""
    outcome, driver = await outcome_of(gateway, api_format, StreamError(at=at))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous, outcome.status) == ("provider_unavailable", True, None)
    assert isinstance(driver.deltas[-1], ErrorDelta)
    refused, _ = await outcome_of(gateway, api_format, StreamError(at=at, error_type="authentication_error"))
    assert isinstance(refused, Failed)
    assert refused.kind == "auth"


@pytest.mark.parametrize("api_format", FORMATS)
async def test_an_overflow_reported_inside_the_stream_is_one(gateway: ModelGateway, api_format: str) -> None:
    fault = StreamError(error_type="api_error", message="prompt is too long: 300000 tokens > 200000 maximum")
    outcome, _ = await outcome_of(gateway, api_format, fault)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "context_window"


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    "fault",
    [
        Cut(at="mid_text"),
        Cut(at="mid_text", clean=True),
        Cut(at="mid_arguments", clean=True),
        Cut(at="end", clean=True),
        Cut(frames=0, clean=True),
        NoHeaders(drop=True),
    ],
    ids=repr,
)
async def test_a_cut_stream_is_no_answer(gateway: ModelGateway, api_format: str, fault: Fault) -> None:
    outcome, _ = await outcome_of(gateway, api_format, fault)
    assert isinstance(outcome, Failed), outcome
    assert (outcome.kind, outcome.ambiguous) == ("transient", True)


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (NoHeaders(), "did not begin to answer"),
        (Silence(at="mid_text"), "brought nothing new within 0.3 s"),
        (Silence(at="first_delta"), "brought nothing new within 0.3 s"),
        (Drip(interval_ms=50), "brought nothing new within 0.3 s"),
    ],
    ids=repr,
)
async def test_silence_and_keep_alives_end_in_time(
    gateway: ModelGateway, api_format: str, fault: Fault, words: str
) -> None:
    """Source: field-reports B44. The server keeps its socket open: only our own limits end these."""
    quick = Limits(connect=0.1, first_byte=0.3, idle=0.3, total=60.0)
    async with ModelServer(plan(BUSY)) as server, asyncio.timeout(20):
        server.faults.push(fault)
        driver = Driver(gateway, target(server.url, api_format, quick))
        driver.log.user("go")
        outcome = await driver.attempt()
        assert isinstance(outcome, Failed)
        assert (outcome.kind, outcome.ambiguous) == ("transient", True)
        assert words in outcome.message
        await server.log.until(lambda log: log.last.outcome != "open")  # the connection is closed, not abandoned


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_stream_that_goes_on_and_on_meets_the_total_limit_and_a_slow_one_does_not(
    gateway: ModelGateway, api_format: str
) -> None:
    """Source: field-reports B44: idle and total are different limits."""
    words = tuple("abcdefghij")
    slow = Answer(blocks=(Text(chunks=words),))
    async with ModelServer(plan(slow)) as server:
        server.timing = type(server.timing)(token_ms=60)
        patient = Limits(connect=30.0, first_byte=30.0, idle=0.3, total=60.0)
        driver = Driver(gateway, target(server.url, api_format, patient))
        driver.log.user("go")
        outcome = await driver.attempt()
        if isinstance(outcome, Failed):  # when this process stands still for as long as that, it is silence too
            driver = Driver(gateway, target(server.url, api_format, patient))
            driver.log.user("go")
            outcome = await driver.attempt()
        assert isinstance(outcome, Completed)
        assert driver.log.events.pop()
        driver = Driver(gateway, target(server.url, api_format, Limits(30.0, 30.0, 30.0, 0.25)))
        driver.log.user("go")
        late = await driver.attempt()
    assert isinstance(late, Failed)
    assert "did not finish its answer within 0.25 s" in late.message


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize("fault", [Silence(at="mid_text"), Drip(interval_ms=20), NoHeaders()], ids=repr)
async def test_cancelling_closes_the_connection_at_once(gateway: ModelGateway, api_format: str, fault: Fault) -> None:
    async with ModelServer(plan(BUSY)) as server:
        server.faults.push(fault)
        driver = Driver(gateway, target(server.url, api_format, Limits()))
        driver.log.user("go")
        task = asyncio.create_task(driver.attempt())
        await server.log.until(lambda log: bool(log.entries) and (log.last.frames > 0 or fault == NoHeaders()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        await server.log.until(lambda log: log.last.outcome == "gone", timeout=20)


@pytest.mark.parametrize("api_format", FORMATS)
async def test_odd_contents(gateway: ModelGateway, api_format: str) -> None:
    """Source: field-reports B04, B13, B43."""
    empty, _ = await outcome_of(gateway, api_format, Content("empty"), say("x"))
    assert isinstance(empty, Completed)
    assert empty.blocks == ()
    blank, _ = await outcome_of(gateway, api_format, Content("blank_text"))
    assert isinstance(blank, Completed)
    assert not [block for block in blank.blocks if isinstance(block, TextBlock)]
    cut, _ = await outcome_of(gateway, api_format, Content("half_arguments"))
    assert isinstance(cut, Completed)
    assert (cut.stop_reason, cut.replay) == ("max_tokens", None)
    assert [call.input for call in cut.calls] == [{}], "a call of a cut answer is told, and the engine never runs it"
    broken, _ = await outcome_of(gateway, api_format, Content("half_arguments", stop="tool_use"))
    assert isinstance(broken, Completed)
    (call,) = broken.calls
    assert call.input == {}
    assert call.problem is not None
    assert "not valid JSON" in call.problem


@pytest.mark.parametrize("api_format", FORMATS)
@pytest.mark.parametrize(
    ("kind", "mark"), [("split_surrogates", "😀"), ("lone_surrogate", "\ufffd"), ("nul", "\ufffd")]
)
async def test_characters_that_the_database_refuses(
    gateway: ModelGateway, api_format: str, kind: Any, mark: str
) -> None:
    """Source: field-reports B13."""
    outcome, driver = await outcome_of(gateway, api_format, Content(kind), say("hello there"))
    assert isinstance(outcome, Completed)
    text = "".join(block.text for block in outcome.blocks)  # type: ignore[union-attr]
    assert mark in text
    said = "".join(getattr(delta, "delta", "") for delta in driver.deltas)
    assert said == text
    (text + said).encode()  # neither has half a character
    assert "\0" not in text


@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_call_with_such_characters_is_told_as_it_was_asked(gateway: ModelGateway, api_format: str) -> None:
    """Whoever decides about a call must see what it cannot run; what goes back to the model can be stored."""
    asked = {"command": "printf 'a\0b' >file"}
    async with ModelServer(plan(Answer(blocks=(Call("look", asked),)), say("Done."))) as server:
        driver = Driver(gateway, target(server.url, api_format))
        driver.log.user("go")
        outcome = await driver.attempt()
    assert isinstance(outcome, Completed)
    (call,) = outcome.calls
    assert (call.input, call.problem) == (asked, None)
    assert b"u0000" not in (outcome.replay or b"")


@pytest.mark.parametrize("api_format", FORMATS)
async def test_the_conversation_goes_on_after_each_of_these(gateway: ModelGateway, api_format: str) -> None:
    """A failed attempt leaves nothing behind: the next request is the same, then grows."""
    async with ModelServer(plan(BUSY, say("Done."))) as server:
        driver = Driver(gateway, target(server.url, api_format))
        driver.log.user("go")
        server.faults.push(HttpError(500), Cut(at="mid_text"), StreamError())
        for _ in range(3):
            assert isinstance(await driver.attempt(), Failed)
        driver.log.error("the provider was away")
        assert (await driver.run("hello")).stop_reason == "end_turn"
        first, *rest = [entry.raw for entry in server.log.entries]
    assert rest[:2] == [first, first]
    mark = first.rindex(b',"cache_control"') if api_format == ANTHROPIC else first.rindex(b'"}')
    assert rest[2].startswith(first[:mark])


async def test_nobody_listens_at_the_endpoint(gateway: ModelGateway, unused_tcp_port: int) -> None:
    driver = Driver(gateway, target(f"http://127.0.0.1:{unused_tcp_port}", CHAT))
    driver.log.user("go")
    outcome = await driver.attempt()
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.ambiguous) == ("transient", False)
    assert "could not connect" in outcome.message


@pytest.mark.parametrize("url", ["ftp://x", "http://user:pass@127.0.0.1", "nonsense", "http://[::"])
async def test_a_url_that_is_none(gateway: ModelGateway, url: str) -> None:
    driver = Driver(gateway, target(url, CHAT))
    driver.log.user("go")
    outcome = await driver.attempt()
    assert isinstance(outcome, Failed)
    assert outcome.kind == "invalid_request"


@pytest.mark.parametrize("key", [None, ApiKey(""), ApiKey("a b"), ApiKey("a\r\nx: y"), ApiKey("schlüssel")])
@pytest.mark.parametrize("api_format", FORMATS)
async def test_a_key_that_no_header_can_carry(gateway: ModelGateway, api_format: str, key: ApiKey | None) -> None:
    driver = Driver(gateway, ModelTarget(revision_id="r", provider="p", slug="s", api_format=api_format, api_key=key))
    driver.log.user("go")
    outcome = await driver.attempt()
    assert isinstance(outcome, Failed)
    assert outcome.kind == "auth"


@pytest.mark.parametrize("api_format", FORMATS)
async def test_words_about_signatures_mean_nothing_when_none_were_sent(gateway: ModelGateway, api_format: str) -> None:
    """Otherwise a request that is wrong in another way would be sent once more for nothing."""
    fault = HttpError(400, message="messages.1: Invalid `signature` in `thinking` block")
    outcome, _ = await outcome_of(gateway, api_format, fault)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "invalid_request"
