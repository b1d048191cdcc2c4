"""Files are read and written in threads: what blocks there must not hold up everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from omnara.machines.posix.keeper import files
from omnara.machines.processes import HomeFull, HomeLost

__all__ = ["in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Read or write files. Raises HomeFull; HomeLost when they cannot be used for another reason."""
    try:
        return await asyncio.to_thread(function, *arguments, **named)
    except OSError as error:
        if files.is_full(error):
            raise HomeFull("the machine's disk is full") from error
        raise HomeLost(f"the files of the machine's processes cannot be used: {error}") from error
