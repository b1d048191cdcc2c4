"""What a home on this computer is told about how commands are to run."""

from __future__ import annotations

from typing import Protocol

import msgspec

from omnara.machines.posix.keeper.output import PIECE_BYTES, PIECES

__all__ = ["Limits", "Sandbox", "User"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What tests shrink. Output is kept in `pieces` of `piece_bytes`; times in seconds. Source: machines.md §7."""

    piece_bytes: int = PIECE_BYTES
    pieces: int = PIECES
    grace_s: float = 2.0
    write_s: float = 10.0


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Whom commands run as. Only root can choose somebody else."""

    uid: int
    gid: int


class Sandbox(Protocol):
    """A view of the system that commands are confined to."""

    async def enter(self) -> int:
        """Return a process that lives in it, begun if need be. Raises HomeLost."""
        ...
