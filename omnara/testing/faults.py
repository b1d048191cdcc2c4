"""What goes wrong on purpose, and the queue from which requests draw it.

A fault is data, so that it can be pushed in process, posted to a server in another process, or carried by
one scripted answer.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, Protocol

import msgspec

Point = Literal["first_delta", "mid_text", "before_signature", "mid_arguments", "end"]
"""A place in a stream: before any delta; half-way through the text; thinking sent but not its signature;
half-way through the first call's arguments; everything sent but the closing frames. A place that the
answer does not have (no call, no signature) falls back to `first_delta`."""

ContentKind = Literal[
    "empty", "empty_text", "blank_text", "half_arguments", "split_surrogates", "lone_surrogate", "nul"
]


class HttpError(msgspec.Struct, frozen=True, tag="http"):
    """Answer with an error status and the provider's own error body; fields left out take its usual values.

    `headers` are sent as given, which is how any `retry-after` or `retry-after-ms` gets out.
    """

    status: int
    error_type: str | None = None
    message: str | None = None
    code: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    body: str | None = None


class StreamError(msgspec.Struct, frozen=True, tag="stream_error"):
    """Send an error event inside a 200 stream at `at`, then end the stream.

    `failed` uses `response.failed` instead of `error` in the Responses format; others ignore it.
    """

    at: Point = "first_delta"
    error_type: str = "overloaded_error"
    message: str = "Overloaded"
    failed: bool = False


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Stop at `at`, or after `frames` frames: `clean` ends the HTTP body properly, otherwise the connection drops."""

    at: Point = "mid_text"
    frames: int | None = None
    clean: bool = False


class Silence(msgspec.Struct, frozen=True, tag="silence"):
    """Stop sending at `at`, or after `frames` frames, and keep the socket open until the client leaves."""

    at: Point = "mid_text"
    frames: int | None = None


class Drip(msgspec.Struct, frozen=True, tag="drip"):
    """Send `frames` frames, then only keep-alives, one per `interval_ms`, until the client leaves."""

    interval_ms: float = 10_000
    frames: int = 1


class NoHeaders(msgspec.Struct, frozen=True, tag="no_headers"):
    """Accept the request and never answer it; with `drop` the connection is closed at once instead."""

    drop: bool = False


class Content(msgspec.Struct, frozen=True, tag="content"):
    """Answer, but with content that clients are known to stumble over.

    `half_arguments` cuts the last call's JSON in the middle and reports `stop`, which defaults to
    `max_tokens` (some endpoints report `tool_use` there).
    """

    kind: ContentKind
    stop: Literal["max_tokens", "tool_use"] = "max_tokens"


Fault = HttpError | StreamError | Cut | Silence | Drip | NoHeaders | Content


class Subject(Protocol):
    """What a `Match` looks at: a conversation, seen as far as matching needs it."""

    @property
    def format(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def turn(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def last_user_text(self) -> str: ...


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests a fault or a gate is for; every field left out matches all."""

    format: str | None = None
    model: str | None = None
    key: str | None = None
    turn: int | None = None
    attempt: int | None = None
    contains: str | None = None

    def accepts(self, subject: Subject) -> bool:
        """Return whether `subject` satisfies every field that is set."""
        exact = (
            (self.format, "format"),
            (self.model, "model"),
            (self.key, "key"),
            (self.turn, "turn"),
            (self.attempt, "attempt"),
        )
        if any(want is not None and getattr(subject, name) != want for want, name in exact):
            return False
        return self.contains is None or self.contains in subject.last_user_text


class Planned(msgspec.Struct):
    """A queued fault: strikes `times` matching requests (`-1`: all until cleared) after letting `skip` pass."""

    fault: Fault
    times: int = 1
    skip: int = 0
    match: Match = msgspec.field(default_factory=Match)


class FaultQueue:
    """Faults in the order they were pushed; each request takes the first one meant for it."""

    def __init__(self, *, limit: int = 10_000) -> None:
        self._planned: deque[Planned] = deque()
        self._limit = limit
        self._every = 0
        self._cycle: tuple[Fault, ...] = ()
        self._seen = 0

    def __len__(self) -> int:
        return len(self._planned)

    @property
    def active(self) -> bool:
        """Whether any request may be struck."""
        return bool(self._planned) or self._every > 0

    def push(self, *faults: Fault, times: int = 1, skip: int = 0, match: Match | None = None) -> None:
        """Queue `faults`. Raises `OverflowError` beyond the queue's limit, for a test must not grow silently."""
        for fault in faults:
            self.add(Planned(fault, times, skip, match or Match()))

    def add(self, planned: Planned) -> None:
        """Queue one planned fault. Raises `OverflowError` when the queue is full."""
        if len(self._planned) >= self._limit:
            raise OverflowError(f"more than {self._limit} faults are queued")
        self._planned.append(planned)

    def every(self, requests: int, *faults: Fault) -> None:
        """Strike each `requests`-th request with the next of `faults`, in rotation; 0 switches it off."""
        self._every = requests if faults else 0
        self._cycle = faults
        self._seen = 0

    def clear(self) -> None:
        """Forget everything queued and the rotation."""
        self._planned.clear()
        self.every(0)

    def take(self, subject: Subject) -> Fault | None:
        """Return the fault for this request and use it up, or `None`."""
        for planned in self._planned:
            if not planned.match.accepts(subject):
                continue
            if planned.skip:
                planned.skip -= 1
                continue
            self._use(planned)
            return planned.fault
        return self._from_rotation()

    def _use(self, planned: Planned) -> None:
        if planned.times > 0:
            planned.times -= 1
            if planned.times == 0:
                self._planned.remove(planned)

    def _from_rotation(self) -> Fault | None:
        if not self._every:
            return None
        self._seen += 1
        if self._seen % self._every:
            return None
        return self._cycle[(self._seen // self._every - 1) % len(self._cycle)]


def rate_limited(retry_after: str | None = None, retry_after_ms: str | None = None) -> HttpError:
    """Return a 429 with the given header values, which may be nonsense: they are sent as they are."""
    given = {"retry-after": retry_after, "retry-after-ms": retry_after_ms}
    return HttpError(429, headers={name: value for name, value in given.items() if value is not None})


def overloaded(status: int = 529) -> HttpError:
    """Return the provider's overload answer; OpenAI's is a 503."""
    return HttpError(status)


COMMON_TROUBLE: tuple[Fault, ...] = (rate_limited("0"), HttpError(529), Cut("mid_text"), StreamError("mid_text"))
"""What a busy provider does in a bad hour; all of it is worth a retry."""
