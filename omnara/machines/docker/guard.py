"""Closes a container's way to link-local addresses: from a moment's container in its network, which alone may do that.

The routes go with the container's run. So whoever opens a line into one that was restarted, by hand for example,
closes them once more first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiodocker.exceptions import DockerError

from omnara.machines.docker.engine import Engine
from omnara.machines.docker.layout import route_guard_config
from omnara.machines.processes import HomeLost
from omnara.machines.providers.protocol import MachineSpec, ProviderUnavailable, ProvisionFailed

__all__ = ["close_routes", "closed_again"]

_NEVER: Final = "0001-"
"""How the engine writes the year in which a container ended that has not ended yet."""


async def close_routes(engine: Engine, machine: MachineSpec, shown: Mapping[str, Any]) -> None:
    """Close the routes of a running container. May be repeated.

    Raises ProvisionFailed when its image cannot do that, ProviderUnavailable, DockerError.
    """
    # The id, not the name: a name may have moved on or be gone, the image of a container is there as long as it is.
    config = route_guard_config(machine, shown["Id"], shown["Image"])
    async with engine.call() as docker:
        guard = await docker.containers.create(config)
        try:
            await guard.start()
            ended = await guard.wait()
        finally:
            await engine.remove(guard.id)
    if ended["StatusCode"] != 0:
        raise ProvisionFailed(
            f"link-local addresses could not be closed: the image {shown['Config']['Image']} has neither `ip` nor "
            "`route`; use another, or set guard_link_local to false for a network that does not lead there"
        )


def closed_again(engine: Engine, machine: MachineSpec, container_id: str) -> Callable[[], Awaitable[None]]:
    """Return what has to be awaited before a line is opened: closes the routes of a restarted container.

    That raises HomeLost. It costs one question to the engine for each line.
    """

    async def ready() -> None:
        try:
            shown = await engine.shown(container_id)
            if shown is not None and not shown["State"]["FinishedAt"].startswith(_NEVER):
                await close_routes(engine, machine, shown)
        except (DockerError, ProviderUnavailable, ProvisionFailed) as error:
            raise HomeLost(f"a restarted container's way to link-local addresses is open: {error}") from error

    return ready
