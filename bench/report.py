"""A run's result: one JSON object for machines, a table for people, a file for the record."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from bench.machine import Commit, Machine

__all__ = ["BARS", "Bar", "Judged", "Result", "Run", "judge", "save", "table", "to_json"]

RESULTS: Final = Path(__file__).resolve().parent / "results"


class Bar(msgspec.Struct, frozen=True):
    """What a figure must reach (`bar`) and where it is going (`goal`)."""

    figure: str
    sense: Literal["at least", "at most"]
    bar: float
    goal: float


class Judged(msgspec.Struct, frozen=True):
    """A figure held against its bar."""

    figure: str
    sense: str
    bar: float
    goal: float
    value: float
    passed: bool
    goal_reached: bool


BARS: Final = (
    Bar("ratio_raw", "at least", 0.4, 1.0),
    Bar("ratio_peer", "at least", 8, 25),
    Bar("http_steps_per_s", "at least", 400, 1000),
    Bar("overhead_ms_p50", "at most", 3, 1),
    Bar("first_delta_ms_p50", "at most", 10, 3),
    Bar("recovery_s_p50", "at most", 0.3, 0.1),
    Bar("recovery_s_max", "at most", 1.0, 0.3),
    Bar("restart_s", "at most", 1.0, 1.0),
    Bar("overhead_ratio_10k", "at most", 1.5, 1.1),
    Bar("lag_ms_p99", "at most", 250, 100),
    Bar("lag_ms_p99_2000", "at most", 250, 100),
    Bar("tokens_dropped", "at most", 0, 0),
    Bar("tokens_dropped_2000", "at most", 0, 0),
    Bar("bytes_per_stream", "at most", 60_000, 30_000),
    Bar("bytes_per_stream_2000", "at most", 60_000, 30_000),
    Bar("throughput_kept", "at least", 0.8, 1.0),
    Bar("flat", "at least", 1, 1),
    Bar("ratio_4_to_1", "at least", 0.8, 1.0),
    Bar("double_executions", "at most", 0, 0),
    Bar("local_ms_p50", "at most", 30, 15),
    Bar("daemon_ms_p50", "at most", 30, 15),
    Bar("docker_ms_p50", "at most", 120, 60),
)
"""Source: DESIGN §9, and its promise that a restart loses no more than a second. Under overload a server may lose what
four replicas may lose together. A lag of tokens that were never shown
would be no lag, so none may be missing."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario hands back. `wrong`: what must never be, whatever the speed; a run with any has failed.

    `skipped`: what could not be measured here, and why.
    """

    sizes: Mapping[str, Any]
    figures: Mapping[str, float | int | None]
    details: Mapping[str, Any] = {}
    postgres: Mapping[str, str] = {}
    wrong: Sequence[str] = ()
    skipped: Mapping[str, str] = {}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run with everything that is needed to compare it with another one."""

    scenario: str
    commit: Commit
    started_at: str
    took_s: float
    machine: Machine
    default_sizes: bool
    run: Run

    @property
    def judged(self) -> list[Judged]:
        """The bars that this run has figures for."""
        return judge(self.run.figures)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong and every bar is reached."""
        return not self.run.wrong and all(one.passed for one in self.judged)


def judge(figures: Mapping[str, float | int | None]) -> list[Judged]:
    """Hold figures against the bars of DESIGN §9."""
    found = []
    for bar in BARS:
        value = figures.get(bar.figure)
        if value is not None:
            reaches: Callable[[Any, Any], bool] = operator.ge if bar.sense == "at least" else operator.le
            judged = Judged(
                bar.figure, bar.sense, bar.bar, bar.goal, value, reaches(value, bar.bar), reaches(value, bar.goal)
            )
            found.append(judged)
    return found


def to_json(result: Result) -> str:
    """Return the result as one line: the figures by name at the top, then what they were measured on."""
    run = result.run
    value = {
        "scenario": result.scenario,
        **run.figures,
        "pass": result.passed,
        "wrong": list(run.wrong),
        "skipped": run.skipped,
        "bars": result.judged,
        "sizes": run.sizes,
        "default_sizes": result.default_sizes,
        "commit": result.commit.id,
        "dirty": result.commit.dirty,
        "started_at": result.started_at,
        "took_s": result.took_s,
        "machine": result.machine,
        "postgres": run.postgres,
        "details": run.details,
    }
    return msgspec.json.encode(value).decode()


def table(result: Result) -> str:
    """Return the result for people: each figure, its bar, and whether it is reached."""
    bars = {one.figure: one for one in result.judged}
    run = result.run
    lines = [f"{result.scenario} at {result.commit.id}{' (dirty)' if result.commit.dirty else ''}", ""]
    for name, value in run.figures.items():
        bar = bars.get(name)
        verdict = ""
        if bar is not None:
            word = "pass" if bar.passed else "MISSED"
            verdict = f"  {word}: {bar.sense} {bar.bar:g} (goal {bar.goal:g}{', reached' if bar.goal_reached else ''})"
        lines.append(f"  {name:<28}{_number(value):>12}{verdict}")
    lines += [f"  not measured: {what}: {why}" for what, why in run.skipped.items()]
    lines += [f"  WRONG: {text}" for text in run.wrong]
    shown = ", ".join(f"{name} {value}" for name, value in run.sizes.items())
    facts = ", ".join(f"{name} {value}" for name, value in run.postgres.items())
    host = result.machine
    lines += ["", f"  sizes: {shown}"]
    if facts:
        lines.append(f"  postgres: {facts}")
    lines.append(
        f"  machine: {host.cores} cores, {host.cpu}, {host.memory_gib} GiB, load before {host.load_before}, "
        f"{host.scheduling} scheduling"
    )
    return "\n".join(lines)


def save(result: Result) -> Path:
    """Write the result under its scenario and commit; an earlier one of the same commit is replaced."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result.scenario}-{result.commit.id}.json"
    path.write_bytes(msgspec.json.format(to_json(result).encode(), indent=2) + b"\n")
    return path


def now_text() -> str:
    """Return the time of day for the record; nothing is decided by it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _number(value: float | int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
