"""`replicas`: one, two and four processes on one database. Does adding replicas cost, and does any step run twice?

Each process is what `omnara serve --roles worker,maintenance` builds, with the in-process model. Model and tool write
every execution to a ledger outside of Postgres before they act: a step that appears twice was executed twice.
Source: DESIGN §9, §2 (invariants 2 and 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.cluster import Cluster, open_cluster
from bench.options import Options
from bench.processes import Child, ChildFailed, start_child, work_directory
from bench.report import Run
from bench.seed import make_ready, seed
from bench.verify import double_executions, look, wrong_with
from omnara.vault import generate_ring

__all__ = ["run"]

GATHER_LIMIT_S: Final = 60.0
WARM_UP_S: Final = 1.0


class _Measured(msgspec.Struct, frozen=True):
    """One pass with a number of processes. `shares`: steps of each process."""

    processes: int
    steps_per_s: float
    shares: list[int]
    executions: int
    doubles: int
    wrong: list[str]


async def run(options: Options) -> Run:
    """Measure each number of processes for `seconds` in two passes, there and back, each on a fresh database.

    There and back, so that a machine that slows down meanwhile is no argument. Raises ChildFailed, NotDurable.
    """
    measured: list[_Measured] = []
    counts = options.processes
    async with work_directory() as directory, open_cluster(options.database_url) as cluster:
        for count in (*counts, *reversed(counts)):
            measured.append(await _measure(cluster, directory / str(len(measured)), count, options))
        facts = cluster.facts
    rates = {count: statistics.fmean(one.steps_per_s for one in measured if one.processes == count) for count in counts}
    figures: dict[str, Any] = {f"steps_per_s_{count}": round(rate, 1) for count, rate in rates.items()}
    if rates.get(1) and 4 in rates:
        figures["ratio_4_to_1"] = round(rates[4] / rates[1], 3)
    figures["executions"] = sum(one.executions for one in measured)
    figures["double_executions"] = sum(one.doubles for one in measured)
    wrong = [text for one in measured for text in one.wrong]
    if figures["double_executions"]:
        wrong.append(f"{figures['double_executions']} steps were executed twice")
    return Run(
        sizes={"agents": options.agents, "seconds": options.seconds, "processes": list(counts)},
        figures=figures,
        details={"passes": msgspec.to_builtins(measured)},
        postgres=facts,
        wrong=wrong,
    )


async def _measure(cluster: Cluster, directory: Path, count: int, options: Options) -> _Measured:
    ring = generate_ring()
    directory.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        database = await stack.enter_async_context(cluster.database(f"replicas_{count}"))
        await seed(database.dsn, options.agents, ring, ready=False)
        ledgers = [directory / f"ledger-{count}-{number}" for number in range(count)]
        children = [
            await stack.enter_async_context(
                start_child(
                    "engine",
                    directory,
                    dsn=database.dsn,
                    embedded=database.embedded,
                    ring=ring.serialise(),
                    ledger=str(ledger),
                )
            )
            for ledger in ledgers
        ]
        await make_ready(database.dsn)
        await _gather(children, options.agents)
        await asyncio.gather(*(child.run(WARM_UP_S, alone=False) for child in children))
        await _gather(children, options.agents)
        slices = await asyncio.gather(*(child.run(options.seconds / 2, alone=False) for child in children))
        await _gather(children, options.agents)
        finished = await _all(children, "finish")
        counted = await look(database.dsn)
    saved = sum(int(answer["saved"]) for answer in finished)
    executions, doubles = double_executions(ledgers)
    wrong = wrong_with(f"{count} processes", counted, saved)
    if executions - doubles != saved:
        wrong.append(f"{count} processes: {executions - doubles} executions for {saved} saved steps")
    rate = sum(float(answer["steps"]) / float(answer["seconds"]) for answer in slices)
    return _Measured(count, rate, [int(answer["steps"]) for answer in slices], executions, doubles, wrong)


async def _gather(children: list[Child], agents: int) -> None:
    """Let all processes look for work at the same moment, and wait until every agent waits at one of their gates.

    Agents move from process to process: a claim is given back after 64 steps, and whoever looks first has it next.
    """
    await _all(children, "poke")
    deadline = time.monotonic() + GATHER_LIMIT_S
    while sum(int(answer["waiting"]) for answer in await _all(children, "waiting")) < agents:
        if time.monotonic() > deadline:
            raise ChildFailed(f"{agents} agents did not start within {GATHER_LIMIT_S:g} s")
        await asyncio.sleep(0.05)


async def _all(children: list[Child], what: str) -> list[dict[str, Any]]:
    return await asyncio.gather(*(child.ask(what) for child in children))
