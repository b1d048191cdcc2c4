"""What the driver needs to know of the places where pool machines live; the provisioner's half is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from omnara.db.fleet import MachineClaim
from omnara.machines.processes import Home

__all__ = ["Closable", "Places"]


@runtime_checkable
class Closable(Protocol):
    """A home that holds something open, which has to be closed by whoever opened it."""

    async def close(self) -> None:
        """Let go of it. Commands go on."""


class Places(Protocol):
    """The places that this replica reaches. For a claim that is held; each method reads the machine's row itself."""

    def driven(self) -> Sequence[tuple[str, str]]:
        """Return pairs of provider and host whose machines have no daemon of their own; an empty host stands for
        machines that name none."""
        ...

    async def open_home(self, claim: MachineClaim) -> Home:
        """Return the processes of a machine. Raises HomeLost when it cannot be reached now, LookupError when the claim
        or the machine has moved on."""
        ...

    async def mend(self, claim: MachineClaim) -> bool:
        """Look at a machine whose home is lost; True when a new container takes its place (with another generation).

        Raises what keeps it from that; the same may succeed later.
        """
        ...
