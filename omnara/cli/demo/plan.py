"""When the server dies: a point drawn from a printed seed, so that a failing run can be had again."""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

__all__ = ["PARALLEL_READS", "KillPlan", "draw", "model_turns"]

KillPoint = Literal["mid_stream", "tool_started", "during_save"]

POINTS: Final[tuple[KillPoint, ...]] = ("mid_stream", "tool_started", "during_save")
PARALLEL_READS: Final = 4
MAX_SAVE_DELAY_MS: Final = 3.0
"""A save takes one to three milliseconds; a kill spread over them meets it before, in and after its commit."""


class KillPlan(msgspec.Struct, frozen=True):
    """Kill at `point` of model turn `turn` (counted from 0); `delay_ms` after the answer's last byte for a save."""

    seed: int
    point: KillPoint
    turn: int
    delay_ms: float

    @property
    def description(self) -> str:
        """One line for people."""
        if self.point == "tool_started":
            return "while web_fetch waits for its page"
        if self.point == "mid_stream":
            return f"in the middle of model answer {self.turn + 1}"
        return f"{self.delay_ms:.1f} ms after the last byte of model answer {self.turn + 1}, during its save"


def model_turns(files: int) -> int:
    """Return how many answers an audit of so many files takes: list, read in parallel, fetch, ask, report."""
    return 1 + -(-files // PARALLEL_READS) + 3


def draw(seed: int, files: int) -> KillPlan:
    """Return the plan of a seed. The same seed and number of files always give the same plan."""
    chance = random.Random(seed)
    point = chance.choice(POINTS)
    return KillPlan(seed, point, chance.randrange(model_turns(files)), chance.uniform(0.0, MAX_SAVE_DELAY_MS))
