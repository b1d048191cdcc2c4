"""One way to take a percentile, for every scenario."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["percentile"]


def percentile(values: Sequence[float], rank: int) -> float:
    """Return the percentile of at least one value, interpolated and rounded to a thousandth."""
    if len(values) < 2:
        return round(values[0], 3)
    return round(statistics.quantiles(values, n=100, method="inclusive")[rank - 1], 3)
