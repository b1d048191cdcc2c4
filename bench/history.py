"""`history`: what one more step costs an agent with 10, 1,000 and 10,000 events in its log, warm and cold.

Warm: the conversation is in the process's cache, so a step should cost its new events only. Cold: it is not, as after
a restart or on another replica, and the step reads, folds and encodes the whole log. Every length is measured in each
round, so that a machine that slows down slows all of them. Source: DESIGN §4 (cost per step), §9.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.cluster import Database, open_cluster
from bench.options import Options
from bench.percentile import percentile
from bench.processes import Child, start_child, work_directory
from bench.report import Run
from bench.seed import seed
from bench.verify import look
from omnara.vault import generate_ring

__all__ = ["run"]

WARM_UP: Final = 5
TURNS_PER_SHORT_LOG: Final = 5
"""Each turn adds two events: a log of ten that had two hundred turns would be no log of ten any more."""
SHORT: Final = 100
COLD_SHARE: Final = 10
"""One cold round for so many warm ones: it costs a hundred times as much and varies less."""

_Rounds = dict[int, list[dict[str, float]]]


async def run(options: Options) -> Run:
    """Grow the logs, then measure. Raises ChildFailed, NotDurable."""
    ring = generate_ring()
    async with contextlib.AsyncExitStack() as stack:
        directory = await stack.enter_async_context(work_directory())
        cluster = await stack.enter_async_context(open_cluster(options.database_url))
        database = await stack.enter_async_context(cluster.database("history"))
        counts = {length: _agents_for(length, options.rounds) for length in options.events}
        seeded = await seed(database.dsn, sum(counts.values()), ring)
        names = iter([str(agent) for agent in seeded.agents])
        agents = {length: [next(names) for _ in range(count)] for length, count in counts.items()}
        spec = {"ring": ring.serialise(), "targets": {name: n for n, group in agents.items() for name in group}}
        warm = await _measure(database, directory, agents, options.rounds, spec)
        rounds = max(2, options.rounds // COLD_SHARE)
        cold = await _measure(database, directory, agents, rounds, {**spec, "settings": {"context_cache_bytes": 0}})
        counted = await look(database.dsn)
    return Run(
        sizes={"events": list(options.events), "rounds": options.rounds, "cold_rounds": rounds, "event_bytes": 100},
        figures=_figures(warm, cold),
        details={"warm_ms": _spread(warm), "cold_ms": _spread(cold), "steps": counted.succeeded},
        postgres=cluster.facts,
        wrong=[*counted.broken, *(f"steps that did not succeed: {counted.others}" for _ in counted.others)],
    )


def _agents_for(length: int, rounds: int) -> int:
    return max(1, rounds // TURNS_PER_SHORT_LOG) if length <= SHORT else 1


async def _measure(
    database: Database, directory: Path, agents: Mapping[int, Sequence[str]], rounds: int, spec: dict[str, Any]
) -> _Rounds:
    """Let one process grow what has to be grown and measure every length in each round."""
    everybody = [name for group in agents.values() for name in group]
    found: _Rounds = {length: [] for length in agents}
    async with start_child(
        "log", directory, dsn=database.dsn, embedded=database.embedded, agents=everybody, **spec
    ) as child:
        await child.ask("grow", within_s=600.0)
        for number in range(WARM_UP + rounds):
            for length, group in agents.items():
                one = await _step(child, group[number % len(group)], number)
                if number >= WARM_UP:
                    found[length].append(one)
    return found


async def _step(child: Child, agent: str, number: int) -> dict[str, float]:
    return {name: float(value) for name, value in (await child.ask("step", agent=agent, round=number)).items()}


def _figures(warm: _Rounds, cold: _Rounds) -> dict[str, float | None]:
    """The ratio is of medians, between the longest log and the shortest one."""
    short, long = min(warm), max(warm)
    warm_ms = {length: percentile([one["total"] for one in rounds], 50) for length, rounds in warm.items()}
    cold_ms = {length: percentile([one["total"] for one in rounds], 50) for length, rounds in cold.items()}
    figures: dict[str, float | None] = {f"overhead_ratio_{_name(long)}": round(warm_ms[long] / warm_ms[short], 3)}
    figures |= {f"overhead_ms_{_name(length)}": value for length, value in warm_ms.items()}
    figures |= {f"cold_ms_{_name(length)}": value for length, value in cold_ms.items()}
    figures[f"body_ms_{_name(long)}"] = percentile([one["body_ms"] for one in warm[long]], 50)
    figures[f"body_bytes_{_name(long)}"] = int(warm[long][-1]["body_bytes"])
    return figures


def _spread(found: _Rounds) -> dict[str, Any]:
    parts = ("total", "claim", "begin", "model", "save")
    return {
        _name(length): {
            part: {f"p{rank}": percentile([one[part] for one in rounds], rank) for rank in (50, 90, 99)}
            for part in parts
        }
        for length, rounds in found.items()
    }


def _name(length: int) -> str:
    return f"{length // 1000}k" if length >= 1000 and length % 1000 == 0 else str(length)
