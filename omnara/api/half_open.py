"""Noticing clients that are gone without a word: a cut network, a suspended laptop, a proxy that forgot them.

The kernel takes a heartbeat for such a client and tries to deliver it for a quarter of an hour, during which a stream
would be held for nobody. Source: field-reports B31 (half-open sockets are gone within two heartbeats).
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

__all__ = ["expect_acknowledgement"]

HEARTBEATS: Final = 2
AT_LEAST_S: Final = 5.0
"""However short the heartbeats are: a client on a bad line is slow, not gone."""
_OPTION: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)


def expect_acknowledgement(transport: asyncio.BaseTransport | None, heartbeat_s: float) -> None:
    """Have the kernel end a connection whose client confirms nothing for two heartbeats. Does nothing where the system
    has no such option, and for what is no TCP connection; then only the kernel's own patience ends it.
    """
    lent = None if transport is None else transport.get_extra_info("socket")
    if _OPTION is None or lent is None or lent.family not in (socket.AF_INET, socket.AF_INET6):
        return
    limit_s = max(AT_LEAST_S, HEARTBEATS * heartbeat_s)
    # A dup of the descriptor, since event loops hand out a socket object that may not be changed.
    with socket.socket(fileno=os.dup(lent.fileno())) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, _OPTION, round(limit_s * 1000))
