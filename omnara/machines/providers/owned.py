"""What a provider can tell of all that an installation has with it, so that what no machine has any more is removed."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

from omnara.machines.providers.protocol import ResourceState

__all__ = ["Owned", "SweptProvider"]


class Owned(msgspec.Struct, frozen=True):
    """Something with the installation's label: what machines run in, by its id, or their files, by their name."""

    kind: Literal["container", "volume"]
    resource_id: str
    machine_id: str
    state: ResourceState


@runtime_checkable
class SweptProvider(Protocol):
    """A provider that can tell what it has of this installation."""

    async def owned(self, installation_id: str) -> list[Owned]:
        """Return everything with this installation's label, in an order in which it can be removed.

        Raises ProviderUnavailable.
        """
        ...

    async def running(self, installation_id: str) -> set[str]:
        """Return the ids of what of this installation has not ended, asleep or awake. Raises ProviderUnavailable."""
        ...

    async def discard(self, thing: Owned) -> None:
        """Remove one of them; one that is not there is fine. Raises ProviderUnavailable."""
