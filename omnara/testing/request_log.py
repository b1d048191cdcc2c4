"""What the server was asked and how it went: the outside view that tests and the demo count from."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

Outcome = Literal["open", "answered", "refused", "fault", "gone", "stopped", "script_error"]

_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"})
_MAX_CONVERSATIONS = 100_000


class Entry(msgspec.Struct, kw_only=True):
    """One request. `at` is Unix time in seconds, `seconds` how long it took; `frames` how many events left.

    `raw` and `headers` are empty when the server keeps no bodies.
    """

    number: int
    at: float
    format: str
    path: str
    key: str = ""
    model: str = ""
    turn: int = 0
    attempt: int = 1
    stream: bool = False
    status: int = 0
    outcome: Outcome = "open"
    fault: str | None = None
    detail: str | None = None
    frames: int = 0
    seconds: float = 0.0
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    raw: bytes = b""

    @property
    def body(self) -> Any:
        """The decoded body; `None` when it is not JSON or was not kept."""
        try:
            return msgspec.json.decode(self.raw)
        except (msgspec.DecodeError, RecursionError):
            return None

    def public(self, *, bodies: bool) -> dict[str, Any]:
        """Return the entry for the control routes, the raw request in base64 if `bodies`."""
        shown: dict[str, Any] = msgspec.structs.asdict(self)
        del shown["raw"]
        if bodies:
            shown["body"] = self.body
            shown["raw_base64"] = base64.b64encode(self.raw).decode()
        return shown


class Counts(msgspec.Struct):
    """Totals since the start or the last reset. `repeats`: requests seen before at the same turn."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    faults: int = 0
    gone: int = 0
    stopped: int = 0
    script_errors: int = 0
    repeats: int = 0
    dropped: int = 0
    by_format: Counter[str] = msgspec.field(default_factory=Counter)


_TOTALS: Mapping[Outcome, str] = {
    "answered": "answered",
    "refused": "refused",
    "fault": "faults",
    "gone": "gone",
    "stopped": "stopped",
    "script_error": "script_errors",
}


class RequestLog:
    """The newest `limit` requests and the totals of all; older entries are dropped and counted as such."""

    def __init__(self, *, limit: int = 10_000, bodies: bool = True) -> None:
        self.counts = Counts()
        self.bodies = bodies
        self._entries: deque[Entry] = deque(maxlen=limit)
        self._attempts: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def entries(self) -> list[Entry]:
        """The kept entries, oldest first."""
        return list(self._entries)

    @property
    def last(self) -> Entry:
        """The newest entry. Raises `IndexError` when there is none."""
        return self._entries[-1]

    def of(self, key: str) -> list[Entry]:
        """Return the kept entries of one conversation."""
        return [entry for entry in self._entries if entry.key == key]

    def open(self, *, path: str, wire: str, headers: Mapping[str, str], raw: bytes) -> Entry:
        """Log a request that has arrived."""
        self.counts.requests += 1
        self.counts.by_format[wire] += 1
        entry = Entry(number=self.counts.requests, at=time.time(), format=wire, path=path)
        if self.bodies:
            entry.headers = {name.lower(): _shown(name, value) for name, value in headers.items()}
            entry.raw = raw
        self.counts.dropped += len(self._entries) == self._entries.maxlen
        self._entries.append(entry)
        return entry

    def attempt(self, key: str, turn: int) -> int:
        """Count a request of a conversation at a turn and return its number there, from 1."""
        number = self._attempts.pop((key, turn), 0) + 1
        self._attempts[key, turn] = number
        if len(self._attempts) > _MAX_CONVERSATIONS:
            self._attempts.popitem(last=False)
        self.counts.repeats += number > 1
        return number

    def close(self, entry: Entry, outcome: Outcome, *, status: int | None = None, detail: str | None = None) -> None:
        """Record how a request ended; only the first outcome counts."""
        if entry.outcome != "open":
            return
        entry.outcome = outcome
        entry.status = entry.status if status is None else status
        entry.detail = detail or entry.detail
        entry.seconds = time.time() - entry.at
        name = _TOTALS[outcome]
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        self.touch()

    def touch(self) -> None:
        """Wake those who wait in `until`."""
        if not self._changed.is_set():
            self._changed.set()

    async def until(self, reached: Callable[[RequestLog], bool], timeout: float = 10.0) -> None:
        """Wait until `reached(self)`; looked at whenever a request arrives or ends. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout):
            while not reached(self):
                self._changed.clear()
                await self._changed.wait()

    def reset(self) -> None:
        """Forget all entries, attempts and totals."""
        self.counts = Counts()
        self._entries.clear()
        self._attempts.clear()


def _shown(name: str, value: str) -> str:
    return "***" if name.lower() in _SECRET_HEADERS else value
