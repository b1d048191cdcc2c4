"""Whether an image serves for machines, found out as its container is made: later it would be one loss after another.

Whoever takes a container that cannot serve for a machine makes it again for ever, since each has the same image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from omnara.machines.docker.engine import Engine
from omnara.machines.docker.home import DIRECTORY, DockerHome
from omnara.machines.docker.launchscript import DURABLE
from omnara.machines.processes import HomeLost
from omnara.machines.providers.protocol import ProvisionFailed

__all__ = ["check_volumes", "proven"]

_KEPT: Final = (f"{DIRECTORY}/", f"{DURABLE}/")
_NO_PROGRAM: Final = frozenset({126, 127})
"""What a container's init ends with that could not become its program."""
_NOT_THE_IMAGE: Final = (TimeoutError, DockerError)


def check_volumes(shown: Mapping[str, Any]) -> None:
    """Raise ProvisionFailed for an image with a volume of its own where files are to outlive a container."""
    for mount in shown["Mounts"]:
        if f"{mount['Destination']}/".startswith(_KEPT):
            raise ProvisionFailed(
                f"the image declares a volume at {mount['Destination']}: files there would be lost with each container"
            )


async def proven(engine: Engine, container: DockerContainer, *, new: bool) -> dict[str, Any]:
    """Return what the engine knows of a started container, once that has taken a line.

    Raises ProvisionFailed when it has ended or cannot keep commands, ProviderUnavailable, DockerError. One that
    is merely slow is left to whoever drives it, and so is one that is not `new`: what an agent has put on its volume is
    not the image's fault, and no reason to give its files up. Costs an exec.
    """
    home = DockerHome(container)
    why: HomeLost | None = None
    try:
        await home.processes()
    except HomeLost as error:
        why = error
    finally:
        await home.close()
    shown = await engine.shown(container.id)
    if shown is None or shown["State"]["Status"] != "running":
        code = None if shown is None else shown["State"]["ExitCode"]
        hint = (
            f" with {code}: is there a /bin/sh in the image, for its user and this processor?"
            if code in _NO_PROGRAM
            else ""
        )
        raise ProvisionFailed(f"the container ended as soon as it was started{hint}")
    if why is not None and new and not isinstance(why.__cause__, _NOT_THE_IMAGE):
        raise ProvisionFailed(f"a container of this image cannot keep commands: {why}")
    return shown
