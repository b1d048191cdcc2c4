"""A container of the Docker engine as the demo's machine: looked at and, if need be, removed through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiodocker.exceptions import DockerError

from omnara.cli.demo.database import installation_of
from omnara.cli.demo.plan import MachineKind
from omnara.errors import ConfigurationError
from omnara.machines.docker.home import DIRECTORY
from omnara.machines.docker.layout import DEFAULT_IMAGE, config_of
from omnara.machines.providers.docker import INSTALLATION, DockerProvider
from omnara.machines.providers.protocol import InvalidOptions, ProviderUnavailable
from omnara.testing.audit_commands import LEDGER

__all__ = ["DockerWorkplace"]

PASSES: Final = 50


class DockerWorkplace:
    """A `Workplace` on an engine. `endpoint`: as in the settings; `image`: another one than the sandbox."""

    kind: MachineKind = "docker"

    def __init__(self, endpoint: str | None, image: str | None) -> None:
        self._endpoint = endpoint
        self._image = image or DEFAULT_IMAGE
        self._provider = DockerProvider(endpoint)
        self._data_dir: Path | None = None
        self._installation = ""
        self.pool_config: Mapping[str, Any] = {"image": self._image}

    async def check(self) -> None:
        """See `Workplace`."""
        if self._endpoint == "off":
            raise ConfigurationError("OMNARA_DOCKER_HOST is `off`; say where the engine is, or take it away")
        try:
            config_of(self.pool_config, {})
            await self._provider.host()
            if not await self._has_image():
                raise ConfigurationError(f"the engine has no image {self._image}; {self._remedy()}")
        except InvalidOptions as error:
            raise ConfigurationError(str(error)) from error
        except ProviderUnavailable as error:
            raise ConfigurationError(
                f"{error}; start one, say where it is with OMNARA_DOCKER_HOST, or use --machine local"
            ) from error

    async def _has_image(self) -> bool:
        try:
            async with self._provider.engine.call() as docker:
                await docker.images.inspect(self._image)
        except DockerError as error:
            if error.status == 404:
                return False
            raise ConfigurationError(f"the engine refused to say whether it has {self._image}: {error}") from error
        return True

    def _remedy(self) -> str:
        if self._image != DEFAULT_IMAGE:
            return f"fetch it with: docker pull {self._image}"
        return (
            "make it, where the Containerfile of omnara's source is, with: "
            f"docker build --target sandbox -t {self._image} - <Containerfile   "
            "(or name another one with a POSIX shell by --image)"
        )

    def environment(self) -> dict[str, str]:
        """See `Workplace`."""
        here = {} if self._endpoint is None else {"OMNARA_DOCKER_HOST": self._endpoint}
        return {**here, "OMNARA_LOCAL_MACHINES": "off"}

    def begin(self, data_dir: Path) -> None:
        """See `Workplace`."""
        self._data_dir = data_dir

    async def _whose(self) -> str:
        """Return the installation that its machines are labelled with; empty before the server has given itself one."""
        if not self._installation and self._data_dir is not None:
            self._installation = await installation_of(self._data_dir)
        return self._installation

    async def ledger(self) -> list[str]:
        """See `Workplace`."""
        lines: list[str] = []
        installation = await self._whose()
        if not installation:
            return []
        for found in await self._provider.engine.containers({INSTALLATION: installation}):
            try:
                async with self._provider.engine.call() as docker:
                    archive = await docker.containers.container(found["Id"]).get_archive(f"{DIRECTORY}/{LEDGER}")
            except DockerError as error:
                if error.status in (404, 409):
                    continue  # neither written yet, nor a container any more
                raise
            file = archive.extractfile(LEDGER)
            lines += [] if file is None else file.read().decode().splitlines()
        return lines

    async def left(self) -> list[str]:
        """See `Workplace`."""
        installation = await self._whose()
        found = await self._provider.owned(installation) if installation else []
        return [f"{thing.kind} {thing.resource_id}" for thing in found]

    async def clean(self) -> None:
        """See `Workplace`. Looks again until nothing is found twice: the engine may still be at work for the server."""
        empty = 0
        installation = await self._whose()
        for _ in range(PASSES if installation else 0):
            found = await self._provider.owned(installation)
            for thing in found:
                try:
                    await self._provider.discard(thing)
                except ProviderUnavailable:
                    empty = 0  # it is being removed, or its container is: the next pass sees
            empty = 0 if found else empty + 1
            if empty == 2:
                return
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """See `Workplace`."""
        await self._provider.close()
