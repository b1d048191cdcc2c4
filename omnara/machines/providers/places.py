"""Where pool machines can be made: one `Place` each. A new one is a module and an entry of `PLACES`.

A place is what pools call it, how their settings are checked (by every server, also one that cannot make such machines
itself), and how a process comes to reach it. What a place needs is imported when it is first asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from omnara.log import get_logger
from omnara.machines.providers.protocol import HomeProvider, Provider, ProviderUnavailable
from omnara.settings import Settings

if TYPE_CHECKING:
    from omnara.machines.providers.local import LocalProvider

__all__ = ["PLACES", "DockerSite", "LocalSite", "Place", "Site", "by_name", "sites_of"]

log = get_logger(__name__)


class Site(Protocol):
    """A provider as this process may come to reach it: made when it is needed, asked who it is when it was lost."""

    @property
    def name(self) -> str:
        """What pools call the provider."""
        ...

    async def open(self) -> tuple[Provider, str]:
        """Return the provider and what `Resource.host` says of its machines; an empty text: every replica that has the
        provider reaches all of them. Raises ProviderUnavailable."""
        ...

    async def close(self) -> None:
        """Let go of the provider."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    `site`: returns None where the settings do not allow it. `check`: raises InvalidOptions for a pool's configuration
    or a machine's options, and asks nobody. `daemons`: its provider opens no homes, since its machines run `omnara
    daemon`, which has to find this server. `credential`: its pools have to name the secret that it asks for. `missing`:
    what somebody has to see to when nobody makes its machines.
    """

    name: str
    site: Callable[[Settings], Site | None]
    check: Callable[[Mapping[str, Any], Mapping[str, Any]], None]
    daemons: bool = False
    credential: bool = False
    missing: str = ""

    @property
    def wanted(self) -> str:
        """What is missing when nobody makes its machines."""
        url = ", with OMNARA_PUBLIC_URL set so that the daemons there find it" if self.daemons else ""
        return self.missing or f"a server that has the provider {self.name}{url}"


def by_name(places: Iterable[Place]) -> dict[str, Place]:
    """Return places by what pools call them."""
    return {place.name: place for place in places}


def sites_of(places: Iterable[Place], settings: Settings) -> list[Site]:
    """Return the sites that the settings allow. No I/O."""
    return [site for place in places if (site := place.site(settings)) is not None]


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
        from omnara.machines.providers.local import Unconfined

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
        from omnara.machines.providers.local import LocalProvider, confinement, host_id

        confined = confinement(unsafe=self._unsafe)
        host = host_id(self._data_dir)
        return LocalProvider(self._data_dir / "local-machines", host=host, confined=confined), host

    async def close(self) -> None:
        """See `Site`."""
        if self._made is not None:
            await self._made[0].close()


def _docker_check(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from omnara.machines.docker.layout import config_of

    config_of(config, options)


def _docker_site(settings: Settings) -> Site | None:
    return None if settings.docker_host == "off" else DockerSite(settings.docker_host)


def _local_check(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from omnara.machines.providers.local import LocalProvider

    # Which replica will make the machine is not known, so what only some hosts can do is taken here.
    LocalProvider(Path(), host="", confined="bubblewrap").validate(config, options)


def _local_site(settings: Settings) -> Site | None:
    if settings.local_machines == "off":
        return None
    return LocalSite(settings.data_dir, unsafe=settings.local_machines == "unsafe")


PLACES: Final[Mapping[str, Place]] = by_name(
    (
        Place(
            name="docker",
            site=_docker_site,
            check=_docker_check,
            missing="a container engine that a server reaches: start it, or say where it is with OMNARA_DOCKER_HOST",
        ),
        Place(
            name="local",
            site=_local_site,
            check=_local_check,
            missing="a server on whose computer commands may run: its log says why they may not, see "
            "OMNARA_LOCAL_MACHINES",
        ),
    )
)
