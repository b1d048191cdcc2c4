"""File descriptors, the one thing that a crowd of clients can take from everything else in the process.

The limit is raised at the start, the API's share of it is bounded, and running out of them is told apart from a fault
of whoever was to be reached: a model that is told of an unreachable site believes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from typing import Final

from omnara.log import get_logger

__all__ = ["BEGUN_WITH", "connection_cap", "exhausted", "raise_limit"]

log = get_logger(__name__)

BEGUN_WITH: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The soft limit as it was before `raise_limit`: for programs of others, of which some use `select` or close all there
could be."""
_MOST: Final = 2**20
"""Enough for anybody; some hosts allow a billion, which programs that walk the whole range do not survive."""
_USED_UP: Final = frozenset({errno.EMFILE, errno.ENFILE})


def raise_limit() -> int:
    """Raise this process's soft limit of open files to the hard one and return what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the lower limit holds, as the log says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = _limit()
    log.info("open files", limit=limit, before=soft)
    return limit


def connection_cap(wanted: int) -> int:
    """Return how many client connections may be open: `wanted`, but at most half of the open files.

    The other half is for Postgres, model calls, tools, and connections that are accepted only to be turned away.
    """
    cap = max(1, min(wanted, _limit() // 2))
    if cap < wanted:
        log.warning("the limit of open files allows fewer connections", connections=cap, wanted=wanted)
    return cap


def exhausted(error: BaseException) -> bool:
    """Return whether an operation failed because this process or host has no descriptor left. Blocks for no I/O."""
    chain = tuple(_chain(error))
    if any(isinstance(link, OSError) and link.errno in _USED_UP for link in chain):
        return True
    # The resolver reports its own lack of descriptors as a name that was not found.
    return any(isinstance(link, socket.gaierror) for link in chain) and not _one_left()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _one_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _USED_UP
    return True


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft
