"""Where pool machines of this process can be: a Docker engine, directories of this computer. Opened when asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from omnara.fleet.reached import Site
from omnara.log import get_logger
from omnara.machines.providers.local import LocalProvider, Unconfined, confinement, host_id
from omnara.machines.providers.protocol import HomeProvider, ProviderUnavailable
from omnara.settings import Settings

__all__ = ["DockerSite", "LocalSite", "sites_of"]

log = get_logger(__name__)


def sites_of(settings: Settings) -> list[Site]:
    """Return the sites that the settings allow. No I/O."""
    sites: list[Site] = []
    if settings.docker_host != "off":
        sites.append(DockerSite(settings.docker_host))
    if settings.local_machines != "off":
        sites.append(LocalSite(settings.data_dir, unsafe=settings.local_machines == "unsafe"))
    return sites


class DockerSite:
    """The engine at an endpoint, or wherever the client finds one. Its library is imported by whoever uses it."""

    name = "docker"

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint
        self._provider: HomeProvider | None = None
        self._told: tuple[str, ...] = ()

    async def open(self) -> tuple[HomeProvider, str]:
        """See `Site`."""
        from omnara.machines.providers.docker import DockerProvider

        if self._provider is None:
            self._provider = DockerProvider(self._endpoint)
        assert isinstance(self._provider, DockerProvider)
        host = await self._provider.host()
        if self._provider.engine.unlimited not in ((), self._told):
            self._told = self._provider.engine.unlimited
            log.warning("the engine cannot limit what machines take of everything", unlimited=list(self._told))
        return self._provider, host

    async def close(self) -> None:
        """See `Site`."""
        if self._provider is not None:
            await self._provider.close()


class LocalSite:
    """Directories below the server's own."""

    name = "local"

    def __init__(self, data_dir: Path, *, unsafe: bool) -> None:
        self._data_dir = data_dir
        self._unsafe = unsafe
        self._made: tuple[LocalProvider, str] | None = None
        self._problem = ""

    async def open(self) -> tuple[HomeProvider, str]:
        """See `Site`. What keeps commands away from the server is found out once."""
        if self._problem:
            raise ProviderUnavailable(self._problem)
        if self._made is None:
            try:
                self._made = await asyncio.to_thread(self._make)
            except (Unconfined, OSError) as error:
                self._problem = str(error)
                raise ProviderUnavailable(self._problem) from error
        return self._made

    def _make(self) -> tuple[LocalProvider, str]:
        confined = confinement(unsafe=self._unsafe)
        host = host_id(self._data_dir)
        return LocalProvider(self._data_dir / "local-machines", host=host, confined=confined), host

    async def close(self) -> None:
        """See `Site`."""
        if self._made is not None:
            await self._made[0].close()
