"""`latency`: what the engine adds to one step, and how soon a client sees the first word of an answer.

`overhead_ms` is claim + begin + save around a model that answers at once, on an idle worker. `first_delta_ms` goes the
whole way: a message accepted over HTTP, `omnara serve`, a model behind HTTP, the event stream, the client.
Source: DESIGN §9.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.cluster import Cluster, open_cluster
from bench.options import Options
from bench.percentile import percentile
from bench.processes import Child, start_child, work_directory
from bench.report import Run
from bench.seed import seed
from bench.servers import Server, server_environment
from omnara.access.tokens import TokenKind, generate
from omnara.client import Client, Delta, Event
from omnara.vault import generate_ring

__all__ = ["run"]

AGENTS: Final = 16
WARM_UP: Final = 20
TURN_LIMIT_S: Final = 60.0


async def run(options: Options) -> Run:
    """Measure both on an own Postgres; with `server_url` only the way over HTTP. Raises ChildFailed, NotDurable."""
    sizes = {"rounds": options.rounds}
    if options.server_url is not None:
        model = options.model or "openai/scripted"
        rounds = await _deltas(options.server_url, options.key or "", model, options.rounds, None)
        return Run(sizes=sizes, figures=_delta_figures(rounds), details={"model": model})
    async with work_directory() as directory, open_cluster(options.database_url) as cluster:
        steps = await _idle_steps(cluster, directory, options.rounds)
        rounds = await _own_server(cluster, directory, options.rounds)
        facts = cluster.facts
    verbs = {name: [one[name] for one in steps] for name in ("claim", "begin", "save", "model")}
    overhead = [one["overhead"] for one in steps]
    figures = {
        "overhead_ms_p50": percentile(overhead, 50),
        "overhead_ms_p99": percentile(overhead, 99),
        **{f"{name}_ms_p50": percentile(verbs[name], 50) for name in ("claim", "begin", "save")},
        **_delta_figures(rounds),
    }
    return Run(sizes={**sizes, "agents": AGENTS}, figures=figures, postgres=facts, details=_spread(verbs, overhead))


async def _idle_steps(cluster: Cluster, directory: Path, rounds: int) -> list[dict[str, float]]:
    ring = generate_ring()
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(cluster.database("latency"))
        seeded = await seed(database.dsn, AGENTS, ring)
        child = await stack.enter_async_context(
            start_child(
                "idle",
                directory,
                dsn=database.dsn,
                embedded=database.embedded,
                ring=ring.serialise(),
                agents=[str(agent) for agent in seeded.agents],
            )
        )
        await child.ask("measure", rounds=WARM_UP)
        found: list[dict[str, float]] = (await child.ask("measure", rounds=rounds, within_s=600.0))["rounds"]
    return found


async def _own_server(cluster: Cluster, directory: Path, rounds: int) -> list[dict[str, float]]:
    key, ring = generate(TokenKind.PERSONAL).text, generate_ring()
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(cluster.database("first_delta"))
        model = await stack.enter_async_context(start_child("model", directory, script="fixed", fast=True))
        server = Server("only", server_environment(database, ring, key, str(model.hello["url"])), directory)
        stack.push_async_callback(server.kill)
        await server.start()
        found = await _deltas(server.url, key, "openai/scripted", rounds, model)
        await server.stop()
    return found


async def _deltas(url: str, key: str, slug: str, rounds: int, model: Child | None) -> list[dict[str, float]]:
    """Send messages one at a time to one agent and wait for the first delta of each answer."""
    async with Client(url, key) as client:
        launched = await client.launch(model=slug, system_prompt="Answer in one sentence.", message="Good morning.")
        stream = _Stream()
        async with client.stream(launched.id, deltas=True) as events, asyncio.TaskGroup() as group:
            reading = group.create_task(stream.read(events))
            await stream.turn_over()
            found = []
            for number in range(WARM_UP + rounds):
                one = await _one_delta(client, launched.id, stream, number)
                if model is not None:
                    one["model"] = await _model_time(model)
                if number >= WARM_UP:
                    found.append(one)
            reading.cancel()
        await client.delete(launched.id)
    return found


async def _one_delta(client: Client, agent: str, stream: _Stream, number: int) -> dict[str, float]:
    stream.expect()
    asked = time.perf_counter()
    await client.send(agent, f"Message {number}.")
    accepted = time.perf_counter()
    first = await stream.first_delta()
    await stream.turn_over()
    return {"accepted": (first - accepted) * 1000, "asked": (first - asked) * 1000, "model": 0.0}


async def _model_time(model: Child) -> float:
    """Milliseconds that the newest request spent in the model server."""
    entries = (await model.ask("log"))["entries"]
    return float(entries[-1][2]) * 1000


class _Stream:
    """Reads the event stream and notes when the first delta of an answer and its saved end have come."""

    def __init__(self) -> None:
        self._delta_at: asyncio.Future[float] | None = None
        self._over = asyncio.Event()

    async def read(self, events: Any) -> None:
        """Read for ever."""
        async for item in events:
            if isinstance(item, Delta):
                if self._delta_at is not None and not self._delta_at.done():
                    self._delta_at.set_result(time.perf_counter())
            elif isinstance(item, Event) and item.kind == "model_output":
                self._over.set()

    def expect(self) -> None:
        """Forget the last answer."""
        self._delta_at = asyncio.get_running_loop().create_future()
        self._over.clear()

    async def first_delta(self) -> float:
        """Return when the first delta came."""
        assert self._delta_at is not None
        async with asyncio.timeout(TURN_LIMIT_S):
            return await self._delta_at

    async def turn_over(self) -> None:
        """Wait until the answer is saved."""
        async with asyncio.timeout(TURN_LIMIT_S):
            await self._over.wait()


def _delta_figures(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    accepted = [one["accepted"] - one["model"] for one in rounds]
    asked = [one["asked"] - one["model"] for one in rounds]
    return {
        "first_delta_ms_p50": percentile(accepted, 50),
        "first_delta_ms_p99": percentile(accepted, 99),
        "first_delta_from_request_ms_p50": percentile(asked, 50),
        "model_ms_p50": percentile([one["model"] for one in rounds], 50),
    }


def _spread(verbs: dict[str, list[float]], overhead: list[float]) -> dict[str, Any]:
    shown = {name: {f"p{rank}": percentile(values, rank) for rank in (50, 90, 99)} for name, values in verbs.items()}
    return {"verbs_ms": shown, "overhead_ms": {f"p{rank}": percentile(overhead, rank) for rank in (10, 50, 90, 99)}}
