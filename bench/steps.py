"""`steps`: durable steps per second, against the bare saving statement, a peer, and a model behind HTTP.

All contestants use the same Postgres and run in turns; see `bench.contest`. Source: DESIGN §9.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from bench import endure
from bench.cluster import Cluster, open_cluster
from bench.contest import Score, alternate, ratio, slices_of
from bench.options import Options
from bench.processes import Child, start_child, work_directory
from bench.report import Run
from bench.seed import seed
from bench.verify import look, wrong_with
from omnara.vault import generate_ring

__all__ = ["run"]


async def run(options: Options) -> Run:
    """Run the contest, or with `minutes` the engine alone for so long. Raises ChildFailed, NotDurable."""
    if options.minutes is not None:
        return await endure.run(options)
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        contest = _Contest(stack, cluster, directory, options)
        await contest.enter()
        scores = await alternate(contest.children, options.seconds)
        finished, wrong = await contest.finish()
        rounds, slice_s = slices_of(options.seconds)
        sizes = {"agents": options.agents, "seconds": options.seconds, "rounds": rounds, "slice_s": round(slice_s, 2)}
        return Run(
            sizes=sizes,
            figures=_figures(scores),
            details={"slices": {name: _detail(score) for name, score in scores.items()}, "finished": finished},
            postgres=cluster.facts,
            wrong=wrong,
        )


class _Contest:
    """The contestants of this scenario, each with its own database on the one server."""

    def __init__(self, stack: contextlib.AsyncExitStack, cluster: Cluster, directory: Path, options: Options) -> None:
        self._stack = stack
        self._cluster = cluster
        self._directory = directory
        self._options = options
        self._ring = generate_ring()
        self._dsns: dict[str, str] = {}
        self._model: Child
        self.children: dict[str, Child] = {}

    async def enter(self) -> None:
        """Start all contestants."""
        await self._engine("engine", http=False)
        await self._raw()
        self._model = await self._child("model", script="endless", fast=True)
        await self._engine("http", http=True, base_url=f"{self._model.hello['url']}/v1")
        if self._options.peer == "dbos":
            await self._dbos()

    async def finish(self) -> tuple[dict[str, Any], list[str]]:
        """End all work; return what the contestants counted, and what Postgres does not agree with."""
        finished: dict[str, Any] = {}
        wrong: list[str] = []
        await self._model.ask("end")
        for name, child in self.children.items():
            finished[name] = await child.ask("finish")
            if name in ("engine", "http"):
                wrong += wrong_with(name, await look(self._dsns[name]), int(finished[name]["saved"]))
        return finished, wrong

    async def _engine(self, name: str, *, http: bool, base_url: str = "http://127.0.0.1:9") -> None:
        database = await self._stack.enter_async_context(self._cluster.database(name))
        self._dsns[name] = database.dsn
        await seed(database.dsn, self._options.agents, self._ring, base_url=base_url)
        child = await self._child(
            "engine", dsn=database.dsn, embedded=database.embedded, ring=self._ring.serialise(), http=http
        )
        await child.ask("gathered", agents=self._options.agents)
        self.children[name] = child

    async def _raw(self) -> None:
        database = await self._stack.enter_async_context(self._cluster.database("raw"))
        seeded = await seed(database.dsn, self._options.agents, self._ring, ready=False)
        self.children["raw"] = await self._child("raw", dsn=database.dsn, seeded=msgspec.to_builtins(seeded))

    async def _dbos(self) -> None:
        database = await self._stack.enter_async_context(self._cluster.database("dbos", migrated=False))
        pool = {} if self._options.peer_pool is None else {
            "pool": self._options.peer_pool, "threads": self._options.peer_pool
        }  # fmt: skip
        self.children["dbos"] = await self._child("dbos", dsn=database.dsn, agents=self._options.agents, **pool)

    async def _child(self, kind: str, **spec: Any) -> Child:
        return await self._stack.enter_async_context(start_child(kind, self._directory, **spec))


def _figures(scores: dict[str, Score]) -> dict[str, float | None]:
    engine, raw = scores["engine"], scores["raw"]
    figures: dict[str, float | None] = {
        "steps_per_s": round(engine.per_s, 1),
        "raw_saves_per_s": round(raw.per_s, 1),
        "ratio_raw": ratio(engine, raw),
        "http_steps_per_s": round(scores["http"].per_s, 1),
    }
    if "dbos" in scores:
        figures["peer_steps_per_s"] = round(scores["dbos"].per_s, 1)
        figures["ratio_peer"] = ratio(engine, scores["dbos"])
    return figures


def _detail(score: Score) -> dict[str, Any]:
    return {"rates": score.rates, "cpu_us_per_step": round(score.cpu_us_per_step, 1)}
