"""One step on an idle worker, timed verb by verb: what the engine adds to a model that answers at once.

The clock starts when a message has been committed and its hint given, as the API does it, and stops when the saved
answer is handed to a reader, which is after its commit. Points in between are the engine's own probes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from uuid import UUID

import asyncpg

from bench.engine import EngineContestant
from bench.seed import is_idle, seed_input
from omnara import probes
from omnara.clock import poll_until
from omnara.engine.feed_items import Durable, Subscription

__all__ = ["IdleContestant"]

STEP_LIMIT_S: Final = 30.0
POINTS: Final = ("claimed", "model_begun", "saving")


class IdleContestant(EngineContestant):
    """The engine with a model that ends every turn at once; `measure` runs one step at a time."""

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """As the engine; the agents' first messages are answered before the first measurement."""
        hello = await super().start(spec)
        self.conn: Any = await asyncpg.connect(spec["dsn"])
        self._agents = [UUID(text) for text in spec["agents"]]
        self.work.finish()
        return hello

    def message(self, number: int) -> str:
        """What is said in a round."""
        return f"message {number}"

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`measure` a number of rounds, over the agents in turn."""
        if what != "measure":
            return await super().ask(what, values)
        await self.until_idle()
        rounds = []
        for number in range(int(values["rounds"])):
            rounds.append(await self.one_step(self._agents[number % len(self._agents)], number))
            await self.until_idle()
            await asyncio.sleep(0.01)  # the next message of a person never comes in the same millisecond
        return {"rounds": rounds}

    async def stop(self) -> None:
        """Close the own connection, then the engine."""
        await self.conn.close()
        await super().stop()

    async def one_step(self, agent_id: UUID, number: int) -> dict[str, float]:
        """Return the milliseconds of one step: in all, and for claim, begin and save."""
        at: dict[str, float] = {}

        def note(point: probes.Point) -> None:
            at.setdefault(point.name, time.perf_counter())

        head = await self.conn.fetchval("select next_sequence from agent_sched where agent_id = $1", agent_id)
        feed = self.parts.deps.feed
        reader = feed.subscribe(agent_id, deltas=False, next_sequence=head)
        try:
            with probes.attach(note):
                await seed_input(self.conn, agent_id, self.message(number))
                begun = time.perf_counter()
                self.parts.deps.hints.ready((agent_id,))
                async with asyncio.timeout(STEP_LIMIT_S):
                    await _answered(reader)
                saved = time.perf_counter()
        finally:
            feed.unsubscribe(reader)
        claimed, started, saving = (at[name] for name in POINTS)
        model = saving - started
        parts = {"claim": claimed - begun, "begin": started - claimed, "save": saved - saving, "model": model}
        parts["overhead"] = saved - begun - model
        return {name: seconds * 1000 for name, seconds in parts.items()}

    async def until_idle(self, within_s: float = STEP_LIMIT_S) -> None:
        """Wait until no agent is claimed or ready. Raises TimeoutError."""
        if not await poll_until(lambda: is_idle(self.conn), within_s=within_s, every_s=0.002):
            raise TimeoutError(f"the agents are not idle after {within_s:g} s")


async def _answered(reader: Subscription) -> None:
    """Wait until the model's answer was handed over in memory."""
    while True:
        await reader.wait()
        for item in reader.take().items:
            if isinstance(item, Durable) and item.event.kind == "model_output":
                return
