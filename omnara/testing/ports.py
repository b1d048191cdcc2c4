"""Ports for servers that are started, killed and started again at the same address."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

__all__ = ["free_ports"]

_PORTS: Final = range(20_000, 32_768)
"""Below those that systems give to connections: one of them would take the place of a server that is away just then.

Source: ip(7), ip_local_port_range (32,768 and up on Linux, 49,152 and up elsewhere).
"""


def free_ports() -> tuple[int, int]:
    """Return two ports of the loopback address that nobody uses now. Raises OSError when there are none."""
    with contextlib.ExitStack() as held:
        first, second = (_bound(held) for _ in range(2))
        return first, second


def _bound(held: contextlib.ExitStack) -> int:
    for port in random.sample(_PORTS, 200):
        tried = held.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of the loopback address is free")
