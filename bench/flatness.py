"""The verdict "flat", by a rule that is written into every result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["RULE", "Minute", "Verdict", "judge_flat"]

HOT: Final = "agent_sched"
LEAST_RATE: Final = 0.9
MOST_HOT: Final = 1.25
MOST_MEMORY: Final = 1.1
MOST_HELD_S: Final = 10.0
RULE: Final = (
    "the first interval is left out when there are more than three; then the last third is held against the first "
    f"third: median rate at least {LEAST_RATE}, largest hot table with its indexes at most {MOST_HOT}, largest "
    f"resident memory at most {MOST_MEMORY} times as much; and no snapshot held for more than {MOST_HELD_S:g} s"
)


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen in one interval and at its end. Sizes in bytes, by table: `table`, `indexes`, `dead_rows` (a count)
    and `dead`, the share of the table that these take by Postgres's own estimate.
    """

    number: int
    steps: int
    seconds: float
    rss_bytes: int
    oldest_xmin_s: float
    oldest_xmin_xids: int
    tables: dict[str, dict[str, int]]

    @property
    def per_s(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def hot_bytes(self) -> int:
        """The hot table with its indexes."""
        return self.tables[HOT]["table"] + self.tables[HOT]["indexes"]


class Verdict(msgspec.Struct, frozen=True):
    """`figures` has `flat` (1 or 0) and what it comes from; `reasons` says why it is not."""

    figures: dict[str, float | int | None]
    reasons: list[str]
    rule: str = RULE


def judge_flat(minutes: Sequence[Minute]) -> Verdict:
    """Judge at least three intervals."""
    counted = minutes[1:] if len(minutes) > 3 else minutes
    third = max(1, len(counted) // 3)
    first, last = counted[:third], counted[-third:]
    rate = statistics.median(one.per_s for one in last) / max(1e-9, statistics.median(one.per_s for one in first))
    hot = max(one.hot_bytes for one in last) / max(one.hot_bytes for one in first)
    memory = max(one.rss_bytes for one in last) / max(one.rss_bytes for one in first)
    held_s = max(one.oldest_xmin_s for one in minutes)
    reasons = []
    if rate < LEAST_RATE:
        reasons.append(f"the rate fell to {rate:.2f}")
    if hot > MOST_HOT:
        reasons.append(f"the hot table grew to {hot:.2f}")
    if memory > MOST_MEMORY:
        reasons.append(f"memory grew to {memory:.2f}")
    if held_s > MOST_HELD_S:
        reasons.append(f"a snapshot was held for {held_s:.1f} s")
    figures: dict[str, float | int | None] = {
        "flat": int(not reasons),
        "rate_last_to_first": round(rate, 3),
        "hot_table_last_to_first": round(hot, 3),
        "memory_last_to_first": round(memory, 3),
        "hot_table_bytes": minutes[-1].hot_bytes,
        "hot_dead_rows_max": max(one.tables[HOT]["dead_rows"] for one in minutes),
        "rss_bytes": minutes[-1].rss_bytes,
        "oldest_xmin_s_max": held_s,
    }
    return Verdict(figures, reasons)
