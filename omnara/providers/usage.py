"""Token counts as providers state them, made safe to store, add up and show.

A count comes from a machine that is not ours: a negative one, or one that no request can reach, would end as an error
wherever the counts of an agent are added up, long after the answer that brought it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_COUNT", "Stated", "token_count", "total_count"]

Stated = int | float | None
"""A count as it may come: a fraction must not spoil the answer that it stands beside."""

MAX_COUNT: Final = 2**53 - 1
"""The largest integer that every JSON reader keeps exact. Source: RFC 8259 §6."""


def token_count(stated: Stated) -> int | None:
    """Return a stated count; 0 for a negative one, None for one that cannot be a count."""
    if stated is None or not stated <= MAX_COUNT or stated != int(stated):
        return None
    return max(0, int(stated))


def total_count(*parts: Stated) -> int | None:
    """Return the sum of the parts that are stated and can be counts; None when there is none."""
    known = [count for part in parts if (count := token_count(part)) is not None]
    return token_count(sum(known)) if known else None
