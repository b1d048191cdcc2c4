"""Where the demo's commands run, seen from outside the server: what they wrote down, and that nothing of it is left.

The server makes the machine; the demo only looks, through the engine's own interface or on the disk, so that what it
counts does not pass through the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from omnara.cli.demo.plan import MachineKind
from omnara.clock import Deadline
from omnara.errors import ConfigurationError
from omnara.settings import Settings

__all__ = ["Workplace", "removed_in_time", "workplace"]

REMOVAL_S: Final = 60.0


class Workplace(Protocol):
    """A place for one machine of the demo."""

    kind: MachineKind
    pool_config: Mapping[str, Any]
    """What the pool says to its provider."""

    async def check(self) -> None:
        """Find out before anything is started whether it can serve. Raises ConfigurationError, saying what to do."""

    def environment(self) -> dict[str, str]:
        """Return the settings that the server needs for it."""
        ...

    def begin(self, data_dir: Path) -> None:
        """Be told where the server's data will be."""

    async def ledger(self) -> list[str]:
        """Return the lines that commands have written so far, of all machines."""
        ...

    async def left(self) -> list[str]:
        """Name what there is of the installation's machines."""
        ...

    async def clean(self) -> None:
        """Remove whatever is left, whoever made it. The server is gone. Without effect before `begin`."""

    async def close(self) -> None:
        """Let go of connections."""


def workplace(kind: MachineKind, settings: Settings, image: str | None) -> Workplace:
    """Return the place of a kind. Raises ConfigurationError for an image where there are none."""
    if kind == "docker":
        from omnara.cli.demo.workplace_docker import DockerWorkplace

        return DockerWorkplace(settings.docker_host, image)
    from omnara.cli.demo.workplace_local import LocalWorkplace

    if image is not None:
        raise ConfigurationError("--image is for --machine docker")
    return LocalWorkplace(settings.local_machines)


async def removed_in_time(place: Workplace, limit_s: float = REMOVAL_S) -> list[str]:
    """Wait until the server has removed its machines; return what it has not."""
    deadline = Deadline(limit_s)
    while left := await place.left():
        if deadline.passed:
            return left
        await asyncio.sleep(0.1)
    return []
