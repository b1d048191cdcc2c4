"""The worker's identity as a service: the first to be there, the last to sign off."""

from __future__ import annotations

from omnara.clock import Deadline
from omnara.worker import Identity

__all__ = ["IdentityService"]


class IdentityService:
    """A `Service`: attached before anything claims, signed off after the last save."""

    name = "identity"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def start(self) -> None:
        """Attach the first identity. Raises TimeoutError after 30 s without a database."""
        await self._identity.start()

    async def watch(self) -> None:
        """Raise what ended the identity's thread."""
        await self._identity.watch()

    async def drain(self, deadline: Deadline) -> None:
        """Stay alive: the last saves need it."""

    async def stop(self) -> None:
        """Sign off and release the locks."""
        await self._identity.stop()
