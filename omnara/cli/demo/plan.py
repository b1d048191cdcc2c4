"""When the server dies: a point drawn from a printed seed, so that a failing run can be had again."""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

__all__ = ["PARALLEL_READS", "CommandPlan", "KillPlan", "MachineKind", "draw", "draw_command", "model_turns"]

MachineKind = Literal["docker", "local"]
KillPoint = Literal["mid_stream", "tool_started", "during_save"]

POINTS: Final[tuple[KillPoint, ...]] = ("mid_stream", "tool_started", "during_save")
PARALLEL_READS: Final = 4
MAX_SAVE_DELAY_MS: Final = 3.0
"""A save takes one to three milliseconds; a kill spread over them meets it before, in and after its commit."""


CommandPoint = Literal["command_handed_over", "command_running", "command_outlives"]
COMMAND_POINTS: Final[tuple[CommandPoint, ...]] = ("command_handed_over", "command_running", "command_outlives")
MAX_HANDING_MS: Final = 80.0
"""Within it a call is saved, its command offered, granted and begun, on a machine that has time."""
MAX_RUNNING_MS: Final = 800.0


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


class CommandPlan(msgspec.Struct, frozen=True):
    """Kill around the command that measures the n-th file. `delay_ms` counts from the last byte of the answer that asks
    for it (`command_handed_over`), or from when it is seen to have begun. `command_outlives`: the next process starts
    only after the command has ended, while no server ran.
    """

    seed: int
    point: CommandPoint
    file: int
    delay_ms: float

    @property
    def description(self) -> str:
        """One line for people."""
        number = self.file + 1
        if self.point == "command_handed_over":
            return f"{self.delay_ms:.0f} ms after the model asked for the command on file {number}"
        after = f"{self.delay_ms / 1000:.2f} s after the command on file {number} began"
        return f"{after}, until it has ended" if self.point == "command_outlives" else f"{after}, while it runs"


def draw_command(seed: int, files: int) -> CommandPlan:
    """Return the plan of a seed for an audit by commands: always the same for a number of files."""
    chance = random.Random(seed)
    point = chance.choice(COMMAND_POINTS)
    most = MAX_HANDING_MS if point == "command_handed_over" else MAX_RUNNING_MS
    return CommandPlan(seed, point, chance.randrange(files), chance.uniform(0.0, most))


def model_turns(files: int) -> int:
    """Return how many answers an audit of so many files takes: list, read in parallel, fetch, ask, report."""
    return 1 + -(-files // PARALLEL_READS) + 3


def draw(seed: int, files: int) -> KillPlan:
    """Return the plan of a seed. The same seed and number of files always give the same plan."""
    chance = random.Random(seed)
    point = chance.choice(POINTS)
    return KillPlan(seed, point, chance.randrange(model_turns(files)), chance.uniform(0.0, MAX_SAVE_DELAY_MS))
