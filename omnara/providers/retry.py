"""When to try a failed model call again: pure arithmetic over what the attempt reported.

Nothing waits here. The answer goes to the database, which holds the due time, so a wait costs no slot, survives the
process and can be cancelled.
Source: engine.md §5 (decision order, delay); DESIGN §5; field-reports B45.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec

from omnara.providers.protocol import Failed

BASE_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0
"""Bounds of our own back-off. Source: engine.md §5."""

MAX_ATTEMPTS: Final = 9
"""One call and eight retries. Source: engine.md §5."""

MAX_RETRY_AFTER_S: Final = 366 * 86400.0
"""A provider's wait is honoured up to a year; more is nonsense, and nonsense is ignored like any other."""


class RetryIn(msgspec.Struct, frozen=True):
    """Try again in `delay_s` seconds; with `suppress_replay`, without provider-exact content."""

    delay_s: float
    suppress_replay: bool = False


class Compact(msgspec.Struct, frozen=True):
    """The same request can never succeed: make the conversation smaller first."""


class Stop(msgspec.Struct, frozen=True):
    """The turn ends with this error."""

    exhausted: bool = False


Verdict = RetryIn | Compact | Stop


def decide_retry(
    failed: Failed, attempt: int, context_id: str, *, replay_suppressed: bool = False, max_attempts: int = MAX_ATTEMPTS
) -> Verdict:
    """Decide what follows failed attempt number `attempt` (from 1) of the model call `context_id`.

    `replay_suppressed`: this attempt already left provider-exact content out.
    """
    if failed.kind == "replay_rejected":
        if replay_suppressed or attempt >= max_attempts:
            return Stop(exhausted=attempt >= max_attempts)
        return RetryIn(0.0, suppress_replay=True)
    if failed.kind in ("context_window", "payload_too_large"):
        return Compact()
    if not _wants_retry(failed):
        return Stop()
    if attempt >= max_attempts:
        return Stop(exhausted=True)
    return RetryIn(delay_s(attempt, context_id, failed.retry_after_s))


def _wants_retry(failed: Failed) -> bool:
    if failed.ambiguous and failed.kind in ("transient", "unknown"):
        return True
    if failed.should_retry is not None:
        return failed.should_retry
    return failed.kind in ("transient", "rate_limit", "provider_unavailable", "unknown")


def delay_s(attempt: int, context_id: str, retry_after_s: float | None = None) -> float:
    """Seconds to wait after failed attempt `attempt` (from 1): 1, 2, 4 … 30, each times 80 to 120 %, then at least
    what the provider asked for, however long. The same call and attempt always give the same delay.
    """
    raw = BASE_DELAY_S
    for _ in range(attempt - 1):
        if raw >= MAX_DELAY_S:
            break
        raw *= 2
    jittered = raw * (80 + _fnv1a_32(f"{context_id}:{attempt}".encode()) % 41) / 100
    own = min(jittered, MAX_DELAY_S)
    return own if retry_after_s is None else max(own, retry_after_s)


def parse_retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the provider asks for, from `retry-after-ms`, or `retry-after` as seconds or HTTP date.

    A date is compared with the one that the same response states as its own, since our clock may be wrong; without that
    with `now`, Unix time. Nonsense (negative, not finite, unparsable, beyond a year) is None. Keys of `headers` must be
    lower case, or the mapping case-insensitive.
    """
    millis = _number(headers.get("retry-after-ms", ""))
    if millis is not None and (sane := _sane(millis / 1000)) is not None:
        return sane
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    seconds = _number(text)
    if seconds is not None:
        return _sane(seconds)
    due, sent = _http_date(text), _http_date(headers.get("date", ""))
    return None if due is None else _sane(max(0.0, due - (now if sent is None else sent)))


def _http_date(text: str) -> float | None:
    try:
        date = parsedate_to_datetime(text)
        # A date without a zone is GMT: HTTP has no other.
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _number(text: str) -> float | None:
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _sane(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) and 0 <= seconds <= MAX_RETRY_AFTER_S else None


def _fnv1a_32(data: bytes) -> int:
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
