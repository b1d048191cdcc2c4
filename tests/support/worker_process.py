"""A worker as a process of its own, to be killed or stopped: `python -m tests.support.worker_process '{…}'`.

It writes the points that it reaches to a file, counts its tool's effects in another, and dies at a point if told to.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from omnara import probes
from omnara.domain.content import TextBlock
from omnara.ids import new_uuid
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import ModelCall, Outcome
from omnara.tools.protocol import ToolCallRequest, ToolResult, succeeded
from omnara.worker import saver
from tests.support.engine import Engine, built_in
from tests.support.waiting import until


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the process does. `die_at`: the name of a point, or `sent` for the moment a save has left; `dies_on`: which
    arrival there. `hold`: `model` or `tool`, which then waits until the file `go` exists. `asks`: its model's one call.
    """

    dsn: str
    points: str
    effects: str
    go: str = ""
    die_at: str = ""
    dies_on: int = 1
    hold: str = ""
    lease_s: float = 30.0
    asks: tuple[str, dict[str, Any]] = ("count", {})


def note(effects: Path) -> None:
    """Count one effect."""
    with effects.open("a") as file:
        file.write(f"{os.getpid()}\n")


def die() -> None:
    """End as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Process:
    """The worker, its model and its tool."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._arrivals = 0

    async def script(self, call: ModelCall) -> Outcome:
        """One tool call, then an answer."""
        if self._orders.hold == "model":
            await self._wait()
        return ask(call, self._orders.asks) if len(call.context.messages()) == 1 else say("done")

    async def count(self, _call: ToolCallRequest) -> ToolResult:
        """The effect: one line in a file."""
        note(Path(self._orders.effects))
        if self._orders.hold == "tool":
            await self._wait()
        return succeeded(TextBlock("counted"))

    def reached(self, point: probes.Point) -> None:
        """Die here if this is the point."""
        if point.name == self._orders.die_at:
            self._arrive()

    def _arrive(self) -> None:
        self._arrivals += 1
        if self._arrivals == self._orders.dies_on:
            die()

    async def _wait(self) -> None:
        await until(Path(self._orders.go).exists, "told to go on", limit_s=60)

    def die_when_sent(self) -> None:
        """Let a save leave, and die while the server works on it."""
        real = saver.advance

        async def advance(connection: Any, worker_id: UUID, items: Sequence[Any], timeout_s: float) -> Any:
            sending = asyncio.create_task(real(connection, worker_id, items, timeout_s))
            await asyncio.sleep(0)
            self._arrive()
            return await sending

        saver.advance = advance

    async def run(self) -> None:
        """Work until killed."""
        sql = await asyncpg.connect(self._orders.dsn)
        engine = Engine(self._orders.dsn, sql, new_uuid(), new_uuid(), new_uuid(), self.script)
        if self._orders.die_at == "sent":
            self.die_when_sent()
        with built_in("count", self.count), probes.to_file(Path(self._orders.points)), probes.attach(self.reached):
            await engine.start(worker_lease_s=self._orders.lease_s)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(Process(msgspec.json.decode(sys.argv[1], type=Orders)).run())
