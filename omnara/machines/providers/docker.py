"""Containers of any Docker Engine as machines: one container and one volume for each.

The engine keeps names unique, so the name of a machine's container is the fence: whoever makes it second is told, looks
at the labels, and adopts what is there or removes what an earlier generation left. The volume outlives its container,
so files and the records of commands survive a crash; it goes with the machine. Source: machines.md §12, §13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from omnara.machines.docker.engine import Engine, directories
from omnara.machines.docker.fitness import check_volumes, proven
from omnara.machines.docker.guard import close_routes, closed_again
from omnara.machines.docker.home import DockerHome
from omnara.machines.docker.layout import (
    DEFAULT_IMAGE,
    HOME_VOLUME,
    DockerConfig,
    config_of,
    container_config,
    image_of,
    labels_of,
    owner_of,
)
from omnara.machines.providers.owned import Owned
from omnara.machines.providers.protocol import (
    MachineSpec,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
    ResourceState,
)

__all__ = ["DockerProvider"]

INSTALLATION: Final = "omnara.installation"
MACHINE: Final = "omnara.machine"
GENERATION: Final = "omnara.generation"
ROLE: Final = "omnara.role"

_STATES: Final[Mapping[str, ResourceState]] = {
    "created": "transitional",
    "restarting": "transitional",
    "removing": "transitional",
    "running": "running",
    "paused": "inactive",
    "exited": "terminated",
    "dead": "terminated",
}
CREATE_TRIES: Final = 4


class DockerProvider:
    """A `HomeProvider` over one engine. `endpoint`: as for `docker -H`; None: wherever the client finds one."""

    name = "docker"
    provision_timeout_s = 60.0

    def __init__(self, endpoint: str | None = None) -> None:
        self.engine = Engine(endpoint)

    async def close(self) -> None:
        """See `Provider`."""
        await self.engine.close()

    async def host(self) -> str:
        """Return the engine's id: whichever endpoint leads there. Raises ProviderUnavailable."""
        return await self.engine.identity()

    async def prepare(self, machine: MachineSpec) -> None:
        """See `Provider`. Fetches the image."""
        pool, options = config_of(machine.config, machine.options)
        image = image_of(pool, options)
        try:
            await self.engine.fetch(image)
        except ProvisionFailed as error:
            hint = "; make it with: docker build --target sandbox -t omnara-sandbox - <Containerfile"
            raise ProvisionFailed(f"{error}{hint if image == DEFAULT_IMAGE else ''}") from error

    async def provision(self, machine: MachineSpec) -> Resource:
        """See `Provider`. Adopts what an earlier attempt of this generation made; removes what earlier ones left."""
        pool, options = config_of(machine.config, machine.options)
        container: DockerContainer | None = None
        try:
            await self._remove_strays(machine)
            await self._make_volume(machine)
            container = await self._make_container(machine, pool, image_of(pool, options))
            await self._start(machine, pool, container)
            return await self._described(await proven(self.engine, container, new=machine.generation == 1))
        except (DockerError, ProvisionFailed) as error:
            made = None if container is None else _resource(container.id)
            text = f"the engine refused: {error.message}" if isinstance(error, DockerError) else str(error)
            raise ProvisionFailed(text, resource=made) from error

    async def inspect(self, machine: MachineSpec, resource_id: str | None) -> tuple[ResourceState, Resource | None]:
        """See `Provider`. A container that ended is terminated: its processes are gone, whatever its volume keeps."""
        try:
            shown = await self.engine.shown(resource_id or machine.allocation_name)
            if shown is None:
                return "terminated", None
            if not _owned(shown["Config"]["Labels"], machine):
                return "unknown", None
            return _STATES.get(shown["State"]["Status"], "unknown"), await self._described(shown)
        except DockerError as error:
            raise ProviderUnavailable(f"the engine does not tell: {error.message}") from error

    async def delete(self, machine: MachineSpec, resource_id: str | None) -> None:
        """See `Provider`. Every container of the machine goes, of whatever generation, and then its volume."""
        try:
            for found in await self._containers(machine):
                await self.engine.remove(found["Id"])
            for name in filter(None, (resource_id, machine.allocation_name)):
                shown = await self.engine.shown(name)
                if shown is not None and _owned(shown["Config"]["Labels"], machine):
                    await self.engine.remove(shown["Id"])
            volume = await self.engine.volume(machine.allocation_name)
            if volume is not None and _owned(volume["Labels"], machine):
                await self.engine.remove_volume(machine.allocation_name)
        except DockerError as error:
            raise ProviderUnavailable(f"the engine does not remove it: {error.message}") from error

    async def sleep(self, machine: MachineSpec, resource_id: str) -> None:
        """See `Provider`. Paused: no CPU, its memory stays."""
        await self._change(resource_id, "pause", "paused")

    async def wake(self, machine: MachineSpec, resource_id: str) -> None:
        """See `Provider`."""
        await self._change(resource_id, "unpause", "running")

    async def open_home(self, machine: MachineSpec, resource_id: str) -> DockerHome:
        """Return the container's processes; nothing is asked of it yet."""
        pool, _ = config_of(machine.config, machine.options)
        return DockerHome(
            self.engine.docker.containers.container(resource_id),
            ready=closed_again(self.engine, machine, resource_id) if _guarded(pool) else None,
        )

    async def owned(self, installation_id: str) -> list[Owned]:
        """Return all that this installation has on the engine, containers before volumes. Two calls."""
        try:
            containers = await self.engine.containers({INSTALLATION: installation_id})
            volumes = await self.engine.volumes({INSTALLATION: installation_id})
        except DockerError as error:
            raise ProviderUnavailable(f"the engine does not list: {error.message}") from error
        return [
            *(_owned_container(found) for found in containers if not _at_work(found)),
            *(Owned("volume", found["Name"], found["Labels"].get(MACHINE, ""), "running") for found in volumes),
        ]

    async def running(self, installation_id: str) -> set[str]:
        """Return the ids of the installation's containers that have not ended. One call."""
        try:
            containers = await self.engine.containers({INSTALLATION: installation_id})
        except DockerError as error:
            raise ProviderUnavailable(f"the engine does not list: {error.message}") from error
        return {found["Id"] for found in containers if _STATES.get(found["State"]) != "terminated"}

    async def discard(self, thing: Owned) -> None:
        """Remove something that `owned` returned. Raises ProviderUnavailable."""
        try:
            if thing.kind == "container":
                await self.engine.remove(thing.resource_id)
            else:
                await self.engine.remove_volume(thing.resource_id)
        except DockerError as error:
            raise ProviderUnavailable(f"the engine does not remove it: {error.message}") from error

    # --- parts --------------------------------------------------------------------------------------------

    async def _containers(self, machine: MachineSpec) -> list[dict[str, Any]]:
        return await self.engine.containers({INSTALLATION: machine.installation_id, MACHINE: machine.machine_id})

    async def _remove_strays(self, machine: MachineSpec) -> None:
        """Remove what earlier generations left. The new one is made only when they are gone: that is the fence."""
        for found in await self._containers(machine):
            generation = int(found["Labels"].get(GENERATION, "0"))
            if generation > machine.generation:
                raise ProvisionFailed("a newer container of this machine exists")
            if generation < machine.generation or found["Labels"].get(ROLE):
                await self.engine.remove(found["Id"])

    async def _make_volume(self, machine: MachineSpec) -> None:
        labels = {name: value for name, value in labels_of(machine).items() if name != GENERATION}
        await self.engine.make_volume(machine.allocation_name, labels)
        volume = await self.engine.volume(machine.allocation_name)
        if volume is None or not _owned(volume["Labels"], machine):
            raise ProvisionFailed(f"the volume {machine.allocation_name} belongs to somebody else")

    async def _make_container(self, machine: MachineSpec, pool: DockerConfig, image: str) -> DockerContainer:
        config = container_config(machine, pool, image)
        for _ in range(CREATE_TRIES):
            try:
                async with self.engine.call() as docker:
                    return await docker.containers.create(config, name=machine.allocation_name)
            except DockerError as error:
                if error.status == 404:
                    raise ProvisionFailed(f"image or network is missing on the engine: {error.message}") from error
                if error.status != 409:
                    raise
            adopted = await self._adopted(machine)
            if adopted is not None:
                return adopted
        raise ProviderUnavailable("the name of the container stays taken")

    async def _adopted(self, machine: MachineSpec) -> DockerContainer | None:
        """Return the container that has the name, if it is this generation's and alive; remove an older one of ours."""
        shown = await self.engine.shown(machine.allocation_name)
        if shown is None:
            return None
        labels = shown["Config"]["Labels"]
        if not _owned(labels, machine):
            raise ProvisionFailed(f"the name {machine.allocation_name} belongs to a container of somebody else")
        if int(labels.get(GENERATION, "0")) > machine.generation:
            raise ProvisionFailed("a newer container of this machine exists")
        if labels.get(GENERATION) == str(machine.generation):
            return self.engine.docker.containers.container(shown["Id"])
        await self.engine.remove(shown["Id"])
        return None

    async def _start(self, machine: MachineSpec, pool: DockerConfig, container: DockerContainer) -> None:
        """Start a container with its directories, and close its way to link-local addresses. May be repeated."""
        shown = await self.engine.shown(container.id)
        if shown is None:
            raise ProvisionFailed("the container vanished while it was made")
        check_volumes(shown)
        if shown["State"]["Status"] == "paused":
            await self._change(container.id, "unpause", "running")
        if shown["State"]["Status"] != "running":
            archive = directories(owner_of(pool), {"agent": 0o755, ".omnara": 0o700})
            await self.engine.put_directories(container, HOME_VOLUME, archive)
            async with self.engine.call() as _:
                await container.start()
        if _guarded(pool):
            await close_routes(self.engine, machine, shown)

    async def _change(self, resource_id: str, verb: str, wanted: str) -> None:
        """Pause or unpause; what is so already is fine, whatever the engine says about it (409, or 500)."""
        try:
            async with self.engine.call() as docker:
                container = docker.containers.container(resource_id)
                await (container.pause() if verb == "pause" else container.unpause())
        except DockerError as error:
            shown = await self.engine.shown(resource_id)
            if shown is None or shown["State"]["Status"] != wanted:
                raise ProviderUnavailable(f"the engine cannot {verb} it: {error.message}") from error

    async def _described(self, shown: Mapping[str, Any]) -> Resource:
        networks = (shown.get("NetworkSettings") or {}).get("Networks") or {}
        addresses = [each["IPAddress"] for each in networks.values() if each.get("IPAddress")]
        return _resource(shown["Id"], host=await self.host(), details={"ip_address": addresses[0]} if addresses else {})


def _guarded(pool: DockerConfig) -> bool:
    return pool.network != "none" and pool.guard_link_local


def _resource(container_id: str, *, host: str | None = None, details: Mapping[str, str] | None = None) -> Resource:
    return Resource(resource_id=container_id, host=host, sandbox_url=f"docker:{container_id}", details=details or {})


def _owned(labels: Mapping[str, str] | None, machine: MachineSpec) -> bool:
    found = labels or {}
    return found.get(INSTALLATION) == machine.installation_id and found.get(MACHINE) == machine.machine_id


def _owned_container(found: Mapping[str, Any]) -> Owned:
    state = _STATES.get(found["State"], "unknown")
    return Owned("container", found["Id"], found["Labels"].get(MACHINE, ""), state)


def _at_work(found: Mapping[str, Any]) -> bool:
    """True for a helper's container that runs: it removes itself."""
    return bool(found["Labels"].get(ROLE)) and found["State"] == "running"
