"""Many clients of event streams in one process, each as cheap as a client can be: it finds the tokens and counts.

A full client would use the processor that the server needs. Whether streams are right is what tests are for; here it
is counted that every token comes, how late it is, and that the saved answer holds all of them.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from typing import Any, Final, cast

from bench.paced_model import STAMP_CHARS
from bench.percentile import percentile
from bench.usage import cpu_s
from omnara.clock import poll_until
from omnara.descriptors import raise_limit

__all__ = ["ReadersContestant"]

OPEN_LIMIT_S: Final = 60.0
END_LIMIT_S: Final = 60.0
AT_ONCE: Final = 50
"""Connections that are being opened at the same time: as many as a listener's queue always takes."""
_STAMP: Final = re.compile(rb"\d{%d}" % STAMP_CHARS)


class _Log:
    """All tokens of all streams: when each left the model, and how long it took."""

    def __init__(self) -> None:
        self.sent_ns = array("q")
        self.lag_ns = array("q")
        self.opened = 0
        self.lost = 0
        self.answers: list[int] = []


class _Stream(asyncio.Protocol):
    """One stream. Its chunk sizes stand between frames and are skipped with them."""

    def __init__(self, request: bytes, log: _Log) -> None:
        self._request = request
        self._log = log
        self._rest = b""
        self._open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            if b"event: model_output_delta\n" in frame:
                for stamp in _STAMP.findall(frame):
                    sent = int(stamp)
                    self._log.sent_ns.append(sent)
                    self._log.lag_ns.append(now - sent)
            elif b"event: model_output\n" in frame:
                self._log.answers.append(len(_STAMP.findall(frame)))
            elif not self._open and b": ok" in frame and b" 200 " in frame:
                self._open = True
                self._log.opened += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._log.lost += 1


class ReadersContestant:
    """`start` with `host`, `port`, `key` and the `paths` of the streams: answers once all of them are open."""

    def __init__(self) -> None:
        self._log = _Log()
        self._transports: list[asyncio.BaseTransport] = []

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Open all streams."""
        raise_limit()
        paths: list[str] = spec["paths"]
        for first in range(0, len(paths), AT_ONCE):
            await asyncio.gather(*(self._open(spec, path) for path in paths[first : first + AT_ONCE]))
            await self._until(lambda: self._log.opened >= len(self._transports), OPEN_LIMIT_S, "are open")
        return {"streams": self._log.opened}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`cpu` seconds used; `finish`: wait for every answer, then tell of the tokens sent in [`since`, `until`)."""
        if what == "cpu":
            return {"cpu_s": cpu_s("self")}
        if what != "finish":
            raise ValueError(f"unknown request {what!r}")
        log = self._log
        await self._until(lambda: len(log.answers) >= len(self._transports), END_LIMIT_S, "have their answer")
        since, until = int(values["since"]), int(values["until"])
        lags = [lag / 1e6 for sent, lag in zip(log.sent_ns, log.lag_ns, strict=True) if since <= sent < until]
        return {
            "tokens": len(log.sent_ns),
            "measured": len(lags),
            "lag_ms": {f"p{rank}": percentile(lags, rank) for rank in (50, 90, 99)} if lags else {},
            "lag_ms_max": max(lags, default=0.0),
            "answers": log.answers,
            "lost": log.lost,
        }

    async def stop(self) -> None:
        """Close all streams."""
        for transport in self._transports:
            cast("asyncio.Transport", transport).abort()

    async def _open(self, spec: dict[str, Any], path: str) -> None:
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {spec['host']}\r\nAuthorization: Bearer {spec['key']}\r\n"
            "Accept: text/event-stream\r\n\r\n"
        ).encode()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Stream(request, self._log), spec["host"], spec["port"])
        self._transports.append(transport)

    async def _until(self, reached: Any, within_s: float, what: str) -> None:
        async def check() -> bool:
            return bool(reached()) or bool(self._log.lost)

        if not await poll_until(check, within_s=within_s, every_s=0.01) or self._log.lost:
            raise RuntimeError(
                f"of {len(self._transports)} streams, {self._log.opened} opened, {self._log.lost} were lost and "
                f"{len(self._log.answers)} have an answer; not all {what}"
            )
