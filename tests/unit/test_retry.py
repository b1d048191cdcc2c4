"""When a failed model call is tried again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from omnara.providers import Compact, ErrorKind, Failed, RetryIn, Stop, decide_retry, delay_s, parse_retry_after

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def failed(kind: ErrorKind, *, ambiguous: bool = False, should_retry: bool | None = None) -> Failed:
    return Failed(kind=kind, message="x", ambiguous=ambiguous, should_retry=should_retry)


def test_the_delay_doubles_to_thirty_seconds_within_a_fifth() -> None:
    bases = [1, 2, 4, 8, 16, 32, 32, 32]
    for attempt, base in enumerate(bases, start=1):
        delays = {delay_s(attempt, f"call {number}") for number in range(200)}
        assert min(delays) >= base * 0.8 * 0.999
        assert max(delays) <= min(30.0, base * 1.2 * 1.001)
        assert len(delays) > 5
    assert delay_s(3, "same") == delay_s(3, "same")


def test_the_jitter_is_the_hash_that_is_specified() -> None:
    value = 2166136261
    for byte in b"a:1":
        value = ((value ^ byte) * 16777619) % 2**32
    assert delay_s(1, "a") == (value % 41 + 80) / 100


def test_a_longer_wait_of_the_provider_wins_and_a_shorter_one_does_not() -> None:
    assert delay_s(1, "a", 3600.0) == 3600.0
    assert delay_s(6, "a", 0.5) == delay_s(6, "a")
    asked = Failed(kind="rate_limit", message="later", retry_after_s=3600.0)
    assert decide_retry(asked, 1, "a") == RetryIn(3600.0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "3600"}, 3600.0),
        ({"retry-after-ms": "500"}, 0.5),
        ({"retry-after-ms": "500", "retry-after": "9"}, 0.5),
        ({"retry-after-ms": "nan", "retry-after": "9"}, 9.0),
        ({"retry-after": format_datetime(NOW + timedelta(seconds=3), usegmt=True)}, 3.0),
        ({"retry-after": format_datetime(NOW - timedelta(seconds=3), usegmt=True)}, 0.0),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:07"}, 7.0),
        # The provider's clock is two minutes behind ours, or it says nothing sensible about its clock.
        ({"retry-after": "Sun, 01 Mar 2026 11:58:07 GMT", "date": "Sun, 01 Mar 2026 11:58:00 GMT"}, 7.0),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:07 GMT", "date": "today"}, 7.0),
        ({}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "1_0"}, None),
        ({"retry-after": "٣"}, None),
        ({"retry-after": "1e300"}, None),
        ({"retry-after": "Fri, 01 Jan 99999 00:00:00 GMT"}, None),
        ({"retry-after": "Fri, 99 Foo 2026 99:99:99 GMT"}, None),
        ({"retry-after": "9" * 5000}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert parse_retry_after(headers, NOW.timestamp()) == seconds


@pytest.mark.parametrize("kind", ["transient", "rate_limit", "provider_unavailable", "unknown"])
def test_these_are_tried_again_until_the_budget_is_used_up(kind: ErrorKind) -> None:
    assert isinstance(decide_retry(failed(kind), 1, "c"), RetryIn)
    assert isinstance(decide_retry(failed(kind), 8, "c"), RetryIn)
    assert decide_retry(failed(kind), 9, "c") == Stop(exhausted=True)
    assert decide_retry(failed(kind, should_retry=False), 1, "c") == Stop()


@pytest.mark.parametrize("kind", ["auth", "billing_account", "invalid_request"])
def test_these_are_not_unless_the_provider_says_so(kind: ErrorKind) -> None:
    assert decide_retry(failed(kind), 1, "c") == Stop()
    assert decide_retry(failed(kind, ambiguous=True), 1, "c") == Stop()
    assert isinstance(decide_retry(failed(kind, should_retry=True), 1, "c"), RetryIn)


@pytest.mark.parametrize("kind", ["context_window", "payload_too_large"])
def test_what_is_too_long_is_never_sent_again_as_it_is(kind: ErrorKind) -> None:
    assert decide_retry(failed(kind, should_retry=True), 1, "c") == Compact()


def test_a_refused_replay_is_left_out_once_and_at_once() -> None:
    assert decide_retry(failed("replay_rejected"), 1, "c") == RetryIn(0.0, suppress_replay=True)
    assert decide_retry(failed("replay_rejected"), 2, "c", replay_suppressed=True) == Stop()


def test_an_ambiguous_failure_is_tried_again_whatever_the_provider_says() -> None:
    assert isinstance(decide_retry(failed("transient", ambiguous=True, should_retry=False), 1, "c"), RetryIn)
