"""A model that speaks at a stated pace to many agents at once, and writes into each token when it left.

The scripted model server is for right and wrong; this one is for thousands of tokens a second on the machine that is
measured, so it knows one format, one kind of answer and no more. Requests are held until all are there: then every
agent is in the middle of its answer at the same time, and the tokens of all are spread evenly over time.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, cast

import msgspec

from bench.usage import cpu_s
from omnara.clock import poll_until
from omnara.descriptors import raise_limit

__all__ = ["STAMP_CHARS", "PacedModelContestant"]

STAMP_CHARS: Final = 19
"""Digits of a token: nanoseconds of the machine's monotonic clock, which all processes share."""
LONGEST_NAP_S: Final = 0.002
GATHER_LIMIT_S: Final = 110.0
"""Below the 120 s that the server waits for a first byte."""


def _frame(name: str, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **value}))


_OPEN: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    + _frame(
        "message_start",
        {
            "message": {
                "id": "msg_bench",
                "type": "message",
                "role": "assistant",
                "model": "paced",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        },
    )
    + _frame("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
)
_TOKEN: Final = _frame("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "0" * 19 + " "}})
_BEFORE, _, _AFTER = _TOKEN.partition(b"0" * STAMP_CHARS)
_END: Final = (
    _frame("content_block_stop", {"index": 0})
    + _frame(
        "message_delta", {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 2}}
    )
    + _frame("message_stop", {})
)


class _Listener(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, waiting: list[_Listener]) -> None:
        self._waiting = waiting
        self._received = b""
        self._expected: int | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._expected == 0:
            return
        self._received += data
        if self._expected is None:
            head, found, _ = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            length = next(
                line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
            )
            self._expected = len(head) + 4 + int(length)
        if len(self._received) >= self._expected:
            self._expected, self._received = 0, b""
            self._waiting.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def write(self, data: bytes) -> bool:
        if self.transport is None:
            return False
        self.transport.write(data)
        return True

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class PacedModelContestant:
    """`start` with `rate` (tokens a second for each agent) and `tokens` (of an answer); answers with its `url`."""

    def __init__(self) -> None:
        self._waiting: list[_Listener] = []
        self._server: asyncio.Server | None = None
        self._playing: asyncio.Task[None] | None = None
        self._written = 0

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Listen."""
        raise_limit()
        self._rate, self._tokens = float(spec["rate"]), int(spec["tokens"])
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Listener(self._waiting), "127.0.0.1", 0, backlog=4096)
        return {"url": f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`go` once so many `agents` wait for their answer; `cpu` seconds used so far; `finish` when all is said."""
        if what == "go":
            return await self._go(int(values["agents"]))
        if what == "cpu":
            return {"cpu_s": cpu_s("self")}
        if what == "finish":
            assert self._playing is not None
            await self._playing
            return {"tokens": self._written}
        raise ValueError(f"unknown request {what!r}")

    async def stop(self) -> None:
        """Close the listener."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def _go(self, agents: int) -> dict[str, Any]:
        async def gathered() -> bool:
            return len(self._waiting) >= agents

        if not await poll_until(gathered, within_s=GATHER_LIMIT_S, every_s=0.02):
            raise TimeoutError(f"{len(self._waiting)} of {agents} agents asked the model in {GATHER_LIMIT_S:g} s")
        self._playing = asyncio.create_task(self._play(list(self._waiting)))
        return {"at_ns": time.monotonic_ns()}

    async def _play(self, speakers: list[_Listener]) -> None:
        """Write token k to speaker k modulo n when it is due, and end with everybody's last one."""
        for speaker in speakers:
            speaker.write(_OPEN)
        every_s, begun, number = 1 / (self._rate * len(speakers)), time.monotonic(), 0
        last = self._tokens * len(speakers)
        while number < last:
            ahead_s = begun + number * every_s - time.monotonic()
            if ahead_s > 0:
                await asyncio.sleep(max(ahead_s, LONGEST_NAP_S))
                continue
            token = b"%b%019d%b" % (_BEFORE, time.monotonic_ns(), _AFTER)
            self._written += speakers[number % len(speakers)].write(token)
            number += 1
            if number % len(speakers) == 0:
                await asyncio.sleep(0)  # when it is late, the requests of the machine's other side still get in
        for speaker in speakers:
            speaker.write(_END)
            speaker.close()
