"""Files are read and written in threads: what blocks there must not hold up everybody else.

But for the few small ones that were written a moment ago: they are in memory, and a thread, which has to wait for the
interpreter again and again, takes ten times as long to read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from omnara.machines.posix.keeper import files
from omnara.machines.processes import HomeFull, HomeLost

__all__ = ["at_once", "in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Read or write files. Raises HomeFull; HomeLost when they cannot be used for another reason."""
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except OSError as error:
        raise _meant(error) from error


def at_once(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Read small files that were just written, or do what else does not block. Raises as `in_thread`."""
    try:
        return function(*arguments, **named)
    except OSError as error:
        raise _meant(error) from error


def _meant(error: OSError) -> HomeFull | HomeLost:
    if files.is_full(error):
        return HomeFull("the machine's disk is full")
    return HomeLost(f"the files of the machine's processes cannot be used: {error}")
