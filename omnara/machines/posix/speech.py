"""The home's side of a connection to a keeper."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from omnara.machines.posix.keeper.talk import CONTROL, LENGTH

__all__ = ["answer", "connect"]

_LONGEST_PATH = 100
"""A socket's address has room for 104 to 108 bytes."""


async def connect(directory: Path) -> socket.socket | None:
    """Connect to the keeper of a process; None when none listens."""
    path = directory / CONTROL
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        else:
            await _connect_by_short_name(sock, directory)
    except OSError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_by_short_name(sock: socket.socket, directory: Path) -> None:
    loop = asyncio.get_running_loop()
    if sys.platform == "linux":
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await loop.sock_connect(sock, f"/proc/self/fd/{fd}/{CONTROL}")
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(prefix="omn") as short:
            link = Path(short) / "d"
            link.symlink_to(directory)
            await loop.sock_connect(sock, str(link / CONTROL))


async def answer(sock: socket.socket, wait_s: float) -> dict[str, Any] | None:
    """Return the next answer; None when the keeper hung up. Raises TimeoutError after `wait_s`."""
    async with asyncio.timeout(wait_s):
        header = await _exactly(sock, LENGTH.size)
        body = None if header is None else await _exactly(sock, LENGTH.unpack(header)[0])
    if body is None:
        return None
    value: dict[str, Any] = json.loads(body)
    return value


async def _exactly(sock: socket.socket, size: int) -> bytes | None:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = b""
        with contextlib.suppress(ConnectionError):
            part = await loop.sock_recv(sock, size - len(data))
        if not part:
            return None
        data += part
    return data
