"""Gates: hold a request at a known point until a test lets it go.

A test that kills a process "in mid-stream" must know that it is in mid-stream; sleeping and hoping is how
such tests become flaky.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Literal

import msgspec

from omnara.testing.faults import Match, Point, Subject

GatePoint = Literal["request", "first_delta", "mid_text", "before_signature", "mid_arguments", "end"]
"""`request`: read and logged, no header sent; the others are places in the stream (see `Point`)."""


class GateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gate as data: where, for which requests, and how many of them it holds (`-1`: all)."""

    at: GatePoint = "request"
    times: int = 1
    match: Match = msgspec.field(default_factory=Match)


class Gate:
    """Holds matching requests at a point until `release`. Belongs to the loop of its server."""

    def __init__(self, spec: GateSpec, name: str) -> None:
        self.spec = spec
        self.name = name
        self.held = 0
        self.arrivals = 0
        self._left = spec.times
        self._arrived = asyncio.Event()
        self._open = asyncio.Event()

    async def reached(self, timeout: float = 10.0) -> None:
        """Wait until a request is held, or has been. Raises `TimeoutError` after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            await self._arrived.wait()

    def release(self) -> None:
        """Let go what is held, and everything that comes later."""
        self._open.set()

    def wants(self, subject: Subject) -> bool:
        """Return whether this request is to be held, should it come to the gate's point."""
        return not self._open.is_set() and self._left != 0 and self.spec.match.accepts(subject)

    async def hold(self) -> None:
        """Count an arrival as one of `times` and wait for `release`; pass at once when those are used up.

        Cancelled when the client goes away.
        """
        if self._left == 0 or self._open.is_set():
            return
        self._left -= self._left > 0
        self.held += 1
        self.arrivals += 1
        self._arrived.set()
        try:
            await self._open.wait()
        finally:
            self.held -= 1


class Gates:
    """The gates of one server."""

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._gates)

    def add(self, spec: GateSpec) -> Gate:
        """Set up a gate."""
        gate = Gate(spec, str(next(self._numbers)))
        self._gates[gate.name] = gate
        return gate

    def get(self, name: str) -> Gate | None:
        """Return the gate of that name."""
        return self._gates.get(name)

    def clear(self) -> None:
        """Open and forget all gates."""
        for gate in self._gates.values():
            gate.release()
        self._gates.clear()

    def for_request(self, subject: Subject) -> list[Gate]:
        """Return the gates that want this request."""
        return [gate for gate in self._gates.values() if gate.wants(subject)]


def point_of(gate: Gate) -> Point | None:
    """Return the place in the stream at which a gate holds, `None` for one that holds before the headers."""
    return None if gate.spec.at == "request" else gate.spec.at
