"""Ports for servers that are started, killed and started again at the same address."""

from __future__ import annotations

import atexit
import contextlib
import random
import socket
from collections import deque
from typing import Final

__all__ = ["free_ports"]

_PORTS: Final = range(20_000, 32_768)
"""Below those that systems give to connections: one of them would take the place of a server that is away just then.

Source: ip(7), ip_local_port_range (32,768 and up on Linux, 49,152 and up elsewhere).
"""


_REMEMBERED: Final = 128
"""Ports of one process: more than it has servers at once, and few beside the 1,024 descriptors that it may have."""
_marks: deque[socket.socket] = deque()


def free_ports() -> tuple[int, int]:
    """Return two ports of the loopback address that nobody uses now. Raises OSError when there are none.

    This process's last 128 are nobody else's who asks here, also while no server listens there.
    """
    return _free_port(), _free_port()


def _free_port() -> int:
    for port in random.sample(_PORTS, 200):
        if _is_free(port) and _mark(port):
            return port
    raise OSError("no port of the loopback address is free")


def _is_free(port: int) -> bool:
    with socket.socket() as tried, contextlib.suppress(OSError):
        tried.bind(("127.0.0.1", port))
        return True
    return False


def _mark(port: int) -> bool:
    """Take the port of the same number for datagrams, which is of no use to anybody but gone with this process."""
    mark = socket.socket(type=socket.SOCK_DGRAM)
    try:
        mark.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        return False
    _marks.append(mark)
    while len(_marks) > _REMEMBERED:
        _marks.popleft().close()
    return True


@atexit.register
def _forget() -> None:
    while _marks:
        _marks.pop().close()
