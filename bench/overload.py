"""`overload`: ten times as many ready agents as slots, and more requests than connections. Does the server keep up?

First as many agents as there are slots and one reader: the rate that the server has. Then ten times as many, with
bursts of reads far beyond the API's connections to Postgres, crowds of clients beyond the listener's limit, and
messages all along. What must be: the rate is kept, reads stay quick, whoever is turned away is told when to come back,
and nothing that was accepted is lost. Source: DESIGN §3 (Postgres).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import asyncpg

from bench.api_load import ApiLoad, Seen
from bench.cluster import Database, open_cluster
from bench.options import Options
from bench.percentile import percentile
from bench.processes import Child, ChildFailed, start_child, work_directory
from bench.report import Run
from bench.seed import is_idle, seed_inputs
from bench.servers import Server, server_environment
from bench.verify import look
from bench.workload import ARGUMENTS
from omnara.access.tokens import TokenKind, generate
from omnara.client import Client
from omnara.clock import poll_until
from omnara.ids import IdKind, decode
from omnara.vault import generate_ring

__all__ = ["run"]

FACTOR: Final = 10
MODEL_DELAY_MS: Final = 100.0
"""So that the slots are the limit before the processor is: the rate that is to be kept is the slots' own."""
BURST: Final = 64
CONNECTIONS: Final = 128
CROWD: Final = 256
TALKERS: Final = 8
LAUNCHES_AT_ONCE: Final = 8
WARM_UP_S: Final = 2.0
IDLE_LIMIT_S: Final = 240.0
TOOL: Final = {
    "name": "lookup",
    "description": "Looks up one record.",
    "input_schema": {"type": "object", "properties": {name: {} for name in ARGUMENTS}},
    "permission": "deny",
}
"""A denied call has its result in the same save, so agents go on by themselves, for ever."""


async def run(options: Options) -> Run:
    """Measure both. Raises ChildFailed, NotDurable."""
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        database = await stack.enter_async_context(cluster.database("overload"))
        model = await stack.enter_async_context(
            start_child("model", directory, script="endless", delay_ms=MODEL_DELAY_MS, tool=TOOL["name"])
        )
        busy = await stack.enter_async_context(_Busy(database, directory, model, options.slots))
        alone_rate, alone = await busy.alone(options.seconds)
        crowded_rate, crowded, oldest_wait_s = await busy.crowded(options.seconds)
        wrong = await busy.end()
    figures: dict[str, float | int | None] = {
        "throughput_kept": round(crowded_rate / alone_rate, 3) if alone_rate else 0.0,
        "steps_per_s_alone": round(alone_rate, 1),
        "steps_per_s_overloaded": round(crowded_rate, 1),
        "read_ms_p99": percentile(crowded.read_ms, 99),
        "read_ms_p50": percentile(crowded.read_ms, 50),
        "read_ms_p99_alone": percentile(alone.read_ms, 99),
        "unavailable_503": crowded.unavailable,
        "unheard": crowded.unheard,
        "oldest_wait_s_max": oldest_wait_s,
    }
    return Run(
        sizes={
            "slots": options.slots, "agents": options.slots * FACTOR, "seconds": options.seconds, "burst": BURST,
            "crowd": CROWD, "connections": CONNECTIONS, "model_ms": MODEL_DELAY_MS,
        },
        figures=figures,
        details={name: _told(seen) for name, seen in (("alone", alone), ("overloaded", crowded))},
        postgres=cluster.facts,
        wrong=wrong,
    )  # fmt: skip


class _Busy:
    """A server with few slots and few connections, its agents, and a look into its database."""

    def __init__(self, database: Database, directory: Path, model: Child, slots: int) -> None:
        self._dsn = database.dsn
        self._slots = slots
        self._model = model
        self._key = generate(TokenKind.PERSONAL).text
        settings = {"OMNARA_WORKER_CAPACITY": str(slots), "OMNARA_MAX_CONNECTIONS": str(CONNECTIONS)}
        environment = server_environment(database, generate_ring(), self._key, str(model.hello["url"])) | settings
        self._server = Server("overload", environment, directory)
        self._agents: list[str] = []
        self._talkers: list[str] = []
        self._paths: list[str] = []
        self._seen: list[Seen] = []
        self._conn: Any = None

    async def __aenter__(self) -> _Busy:
        """Start the server and launch all agents, without a word to any of them."""
        try:
            await self._server.start()
            self._conn = await asyncpg.connect(self._dsn)
            async with Client(self._server.url, self._key, timeout_s=60.0) as client:
                self._agents = await self._launch(client, self._slots * FACTOR)
                self._talkers = await self._launch(client, TALKERS)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._close()

    async def alone(self, seconds: float) -> tuple[float, Seen]:
        """As many agents as slots; reads come one at a time. Returns steps a second and what the reader saw."""
        await self._speak(self._agents[: self._slots])
        return await self._both(seconds, burst=1, crowd=0)

    async def crowded(self, seconds: float) -> tuple[float, Seen, float]:
        """All agents, and everybody asks. Returns also the longest time for which an agent was ready and not run."""
        await self._speak(self._agents[self._slots :])
        longest = asyncio.create_task(self._watch_waiting())
        try:
            rate, seen = await self._both(seconds, burst=BURST, crowd=CROWD)
        finally:
            longest.cancel()
            await asyncio.wait([longest])
        return rate, seen, round(self._oldest_s, 3)

    async def end(self) -> list[str]:
        """Let the model end every turn and return what is wrong then: lost messages, broken invariants."""
        await self._model.ask("end")
        if not await poll_until(lambda: is_idle(self._conn), within_s=IDLE_LIMIT_S, every_s=0.1):
            raise ChildFailed(f"agents are not idle after {IDLE_LIMIT_S:g} s\n{self._server.log_tail()}")
        keys = [key for seen in self._seen for key in seen.accepted]
        logged = await self._conn.fetchval(_LOGGED, keys)
        code = await self._server.stop()
        counted = await look(self._dsn)
        wrong = [*counted.broken, *sorted({text for seen in self._seen for text in seen.wrong})]
        if logged != len(keys):
            wrong.append(f"{len(keys)} messages were accepted and {logged} of them are in a log")
        if counted.others:
            wrong.append(f"steps that did not succeed: {counted.others}")
        if code:
            wrong.append(f"the server stopped with code {code}")
        return wrong

    async def _both(self, seconds: float, *, burst: int, crowd: int) -> tuple[float, Seen]:
        """Ask and count steps meanwhile."""
        self._oldest_s = 0.0
        await asyncio.sleep(WARM_UP_S)
        load = ApiLoad(self._server.url, self._key, self._talkers, self._paths, burst=burst, crowd=crowd)
        self._seen.append(load.seen)
        begun, steps = time.monotonic(), await self._steps()
        asking = asyncio.create_task(load.run(seconds))
        try:
            await asyncio.sleep(seconds)
            rate = (await self._steps() - steps) / (time.monotonic() - begun)
            seen = await asking
        finally:
            asking.cancel()
        return rate, seen

    async def _launch(self, client: Client, count: int) -> list[str]:
        found: list[str] = []
        numbers = iter(range(count))

        async def work() -> None:
            for _ in numbers:
                made = await client.launch(model="openai/scripted", system_prompt="Go on.", tools=[TOOL])
                found.append(made.id)
                self._paths = [f"/agents/{made.id}", f"{made.links.events}?after_sequence=0&limit=20"]

        async with asyncio.TaskGroup() as group:
            for _ in range(LAUNCHES_AT_ONCE):
                group.create_task(work())
        return found

    async def _speak(self, agents: Sequence[str]) -> None:
        """Queue a message for each; the server's sweep finds them."""
        await seed_inputs(self._conn, [decode(IdKind.AGENT, agent) for agent in agents], "Go through the list.")

    async def _steps(self) -> int:
        return int(await self._conn.fetchval("select count(*) from steps where state = 'succeeded'"))

    async def _watch_waiting(self) -> None:
        conn = await asyncpg.connect(self._dsn)
        try:
            while True:
                self._oldest_s = max(self._oldest_s, await conn.fetchval(_OLDEST_WAIT))
                await asyncio.sleep(0.5)
        finally:
            conn.terminate()

    async def _close(self) -> None:
        await self._server.kill()
        if self._conn is not None:
            await self._conn.close()


def _told(seen: Seen) -> dict[str, Any]:
    return {
        "reads": seen.reads,
        "answered": seen.answered,
        "unavailable": seen.unavailable,
        "unheard": seen.unheard,
        "messages": len(seen.accepted),
        "read_ms": {f"p{rank}": percentile(seen.read_ms, rank) for rank in (50, 90, 99)},
    }


_OLDEST_WAIT: Final = """
select coalesce(max(extract(epoch from statement_timestamp() - ready_at)), 0)::float8
from agent_sched where worker_id is null and gate = 'open' and ready_at is not null
"""

_LOGGED: Final = """
select count(*) from events
where kind = 'agent_input' and payload->>'input_idempotency_key' = any($1::text[])
"""
