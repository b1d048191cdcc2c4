"""What the driver needs to know of the places where pool machines live; the provisioner's half is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omnara.db.fleet import MachineClaim
from omnara.machines.processes import Home

__all__ = ["DrivenHome", "NoPlaces", "Places"]


class DrivenHome(Home, Protocol):
    """A home that somebody has opened and has to close."""

    async def close(self) -> None:
        """Let go of it. Commands go on."""


class Places(Protocol):
    """The places that this replica reaches. For a claim that is held; each method reads the machine's row itself."""

    def reach(self) -> Sequence[tuple[str, str]]:
        """Return pairs of provider and host, as machines name them; an empty host for those that name none."""
        ...

    async def open_home(self, claim: MachineClaim) -> DrivenHome:
        """Return the processes of a machine. Raises HomeLost when it cannot be reached now, LookupError when the claim
        or the machine has moved on."""
        ...

    async def mend(self, claim: MachineClaim) -> bool:
        """Look at a machine whose home is lost; True when a new container takes its place (with another generation).

        Raises what keeps it from that; the same may succeed later.
        """
        ...


class NoPlaces:
    """A replica that reaches no place: it drives nothing, and still sees to what dead workers have left."""

    def reach(self) -> Sequence[tuple[str, str]]:
        """Nothing."""
        return ()

    async def open_home(self, claim: MachineClaim) -> DrivenHome:
        """Raises LookupError: nothing is claimed here."""
        raise LookupError("this replica reaches no place")

    async def mend(self, claim: MachineClaim) -> bool:
        """There is nothing to mend."""
        return False
