"""Contestants in turns: each has the machine to itself for a slice, round after round.

A shared machine gets slower and faster by itself; in turns, all contestants see the same weather, and their ratio
holds although their rates do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from bench.processes import Child

__all__ = ["SLICE_S", "Score", "alternate", "ratio", "slices_of"]

SLICE_S: Final = 5.0
WARM_UP_S: Final = 1.0


class Score(msgspec.Struct):
    """All slices of one contestant: steps that were durable within them, and their length."""

    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    rates: list[float] = msgspec.field(default_factory=list)

    @property
    def per_s(self) -> float:
        """Steps per second over all slices."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def cpu_us_per_step(self) -> float:
        """The contestant's own processor time for one step, in microseconds; Postgres not included."""
        return self.cpu_s / self.steps * 1e6 if self.steps else 0.0

    def add(self, answer: Mapping[str, float]) -> None:
        """Add one slice."""
        self.steps += int(answer["steps"])
        self.seconds += answer["seconds"]
        self.cpu_s += answer.get("cpu_s", 0.0)
        self.rates.append(round(answer["steps"] / answer["seconds"], 1))


def slices_of(seconds: float) -> tuple[int, float]:
    """Return how many rounds of what length make up so many seconds: five-second slices, but at least two rounds."""
    rounds = max(2, round(seconds / SLICE_S))
    return rounds, seconds / rounds


async def alternate(contestants: Mapping[str, Child], seconds: float) -> dict[str, Score]:
    """Let each contestant run for `seconds` in all, one at a time. Raises ChildFailed."""
    rounds, slice_s = slices_of(seconds)
    scores = {name: Score() for name in contestants}
    for child in contestants.values():
        await child.run(min(WARM_UP_S, slice_s))
    for _ in range(rounds):
        for name, child in contestants.items():
            scores[name].add(await child.run(slice_s))
    return scores


def ratio(one: Score, other: Score) -> float:
    """Return how many times as fast `one` was."""
    return round(one.per_s / other.per_s, 3) if other.per_s else 0.0
