"""A Docker Engine, as far as machines need it: calls with a limit, and errors that say whose fault it is.

Everything is addressed by labels and names that only we give, and checked before it is touched: on an engine that
others use as well, nothing of theirs is ever stopped or removed.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiodocker import Docker
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError

from omnara.machines.providers.protocol import ProviderUnavailable, ProvisionFailed

__all__ = ["Engine", "directories"]

CALL_S: Final = 30.0
PULL_S: Final = 900.0
_LIMITS: Final = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "CPU"}
_NOT_NOW: Final = frozenset({502, 503, 504, 900})
"""The last is the client library's own, for an engine that it cannot connect to."""
_TLS: Final = "with TLS, set DOCKER_TLS_VERIFY=1, and DOCKER_CERT_PATH to where ca.pem, cert.pem and key.pem are"
_BROKEN: Final = (aiohttp.ClientError, OSError, TimeoutError)
_NO_ADDRESS: Final = (AssertionError, AttributeError, ValueError)
"""What the client libraries raise for an address that they can make nothing of, one without a port for one."""
_FORMS: Final = "an address is as unix:///run/docker.sock, or tcp://HOST:2375"


class Engine:
    """One engine. Every method raises ProviderUnavailable when it is away; DockerError tells what it answered."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._docker: Docker | None = None
        self._pulling: dict[str, asyncio.Lock] = {}
        self.unlimited: tuple[str, ...] = ()
        """What it cannot limit, as it told with its id: a rootless one may make containers without any limit."""

    @property
    def docker(self) -> Docker:
        """The client, made at first use: it needs a running loop. Raises ProviderUnavailable without an engine."""
        if self._docker is None:
            try:
                timeout = aiohttp.ClientTimeout(sock_connect=5)
                self._docker = Docker(url=self._endpoint, timeout=timeout)
            except (*_NO_ADDRESS, DockerError) as error:
                why = str(error) or "it is not where `docker` looks for it"
                raise ProviderUnavailable(f"there is no Docker engine: {why}{_hint(why)}") from error
            except OSError as error:
                raise ProviderUnavailable(f"certificates cannot be read: {error}; {_TLS}") from error
        return self._docker

    async def close(self) -> None:
        """Let go of all connections."""
        docker, self._docker = self._docker, None
        if docker is not None:
            await docker.close()

    @asynccontextmanager
    async def call(self, limit_s: float = CALL_S) -> AsyncIterator[Docker]:
        """Yield the client for one call or a few; turns what means "not now" into ProviderUnavailable."""
        try:
            async with asyncio.timeout(limit_s):
                yield self.docker
        except _BROKEN as error:
            raise ProviderUnavailable(
                f"the Docker engine cannot be reached: {error or type(error).__name__}"
            ) from error
        except _NO_ADDRESS as error:
            why = str(error) or "its address has no port"
            raise ProviderUnavailable(f"the Docker engine cannot be asked: {why}; {_FORMS}") from error
        except DockerError as error:
            if error.status in _NOT_NOW:
                why = f"{error.message}{_hint(error.message)}"
                raise ProviderUnavailable(f"the Docker engine is not ready: {why}") from error
            raise

    async def identity(self) -> str:
        """Return the engine's own id: two endpoints with the same one are the same engine."""
        try:
            async with self.call() as docker:
                info: Mapping[str, Any] = await docker.system.info()
                version: Mapping[str, Any] = await docker.version()
        except (TypeError, KeyError) as error:
            raise ProviderUnavailable("what answers there is no Docker engine") from error
        except DockerError as error:
            why = f"{error.message.strip() or error.status}{_hint(error.message)}"
            raise ProviderUnavailable(f"the Docker engine does not say who it is: {why}") from error
        if any(part.get("Name") == "Podman Engine" for part in version.get("Components") or ()):
            raise ProviderUnavailable("this is Podman, which names itself anew each time: a Docker Engine is needed")
        if not info.get("ID"):
            raise ProviderUnavailable("what answers there is a Docker engine without an id")
        self.unlimited = tuple(what for field, what in _LIMITS.items() if info.get(field) is False)
        return str(info["ID"])

    async def shown(self, container: str) -> dict[str, Any] | None:
        """Return what the engine knows of a container by id or name; None when there is none."""
        async with self.call() as docker:
            try:
                return await docker.containers.container(container).show()
            except DockerError as error:
                if error.status == 404:
                    return None
                raise

    async def containers(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return all containers with these labels, in whatever state, as the engine lists them."""
        wanted = [f"{name}={value}" for name, value in labels.items()]
        fields = ("Id", "State", "Labels")
        async with self.call() as docker:
            found = await docker.containers.list(all=True, filters=json.dumps({"label": wanted}))
        return [{field: container[field] for field in fields} for container in found]

    async def volumes(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return all volumes with these labels."""
        async with self.call() as docker:
            client: Any = docker.volumes
            listed = await client.list(filters={"label": [f"{name}={value}" for name, value in labels.items()]})
        return list(listed["Volumes"] or ())

    async def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Make a volume; one that exists stays as it is, with its own labels."""
        async with self.call() as docker:
            client: Any = docker.volumes
            await client.create({"Name": name, "Labels": dict(labels)})

    async def remove(self, container_id: str) -> None:
        """Kill and remove a container; one that is not there is fine. Raises ProviderUnavailable while others do."""
        async with self.call(60.0) as docker:
            try:
                await docker.containers.container(container_id).delete(force=True, v=True)
            except DockerError as error:
                if error.status == 409:
                    raise ProviderUnavailable(f"the container is being removed: {error.message}") from error
                if error.status != 404:
                    raise

    async def volume(self, name: str) -> dict[str, Any] | None:
        """Return what the engine knows of a volume; None when there is none."""
        async with self.call() as docker:
            try:
                client: Any = docker.volumes
                shown: dict[str, Any] = await (await client.get(name)).show()
            except DockerError as error:
                if error.status == 404:
                    return None
                raise
        return shown

    async def remove_volume(self, name: str) -> None:
        """Remove a volume; one that is not there is fine. Raises ProviderUnavailable while something uses it."""
        async with self.call() as docker:
            try:
                client: Any = docker.volumes
                await (await client.get(name)).delete()
            except DockerError as error:
                if error.status == 409:
                    raise ProviderUnavailable(f"the volume is in use: {error.message}") from error
                if error.status != 404:
                    raise

    async def fetch(self, image: str) -> None:
        """Make sure of an image: what is not here is pulled, once at a time. Raises ProvisionFailed, saying why."""
        async with self._pulling.setdefault(image, asyncio.Lock()):
            try:
                async with self.call() as docker:
                    await docker.images.inspect(image)
                    return
            except DockerError as error:
                if error.status != 404:
                    raise ProvisionFailed(f"the image {image} cannot be looked at: {error.message}") from error
            try:
                async with self.call(PULL_S) as docker:
                    await docker.images.pull(image)
            except (DockerError, ProviderUnavailable) as error:
                text = getattr(error, "message", str(error))
                raise ProvisionFailed(
                    f"there is no image {image} on the engine, and it cannot be pulled: {text}"
                ) from error

    async def put_directories(self, container: DockerContainer, path: str, archive: bytes) -> None:
        """Unpack directories into a volume of a container."""
        target: Any = container
        async with self.call():
            await target.put_archive(path, archive)


def _hint(message: str) -> str:
    """Return what to do about an engine that says this, for what people run into."""
    if "Permission denied" in message:
        return "; give the server's user the group of that socket"
    if "HTTPS server" in message or "DOCKER_CERT_PATH" in message or "CERTIFICATE" in message.upper():
        return f"; {_TLS}"
    return ""


def directories(owner: tuple[int, int], modes: Mapping[str, int]) -> bytes:
    """Return an archive of empty directories, by name, with an owner and their modes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode in modes.items():
            entry = tarfile.TarInfo(f"{name}/")
            entry.type = tarfile.DIRTYPE
            entry.mode = mode
            entry.uid, entry.gid = owner
            archive.addfile(entry)
    return buffer.getvalue()
