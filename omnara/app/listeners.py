"""The process's two listeners as services: the public one with the API, and the one for whoever runs it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from omnara.api.connection import ConnectionLimits
from omnara.api.ops import Check, build_ops_app
from omnara.api.server import ApiRunner
from omnara.clock import Deadline
from omnara.descriptors import connection_cap
from omnara.errors import ConfigurationError
from omnara.log import get_logger
from omnara.metrics import Metrics
from omnara.settings import Address, Settings

__all__ = ["Listener", "api_limits", "ops_limits", "ops_listener"]

log = get_logger(__name__)


class Listener:
    """A `Service` around an aiohttp runner. It answers until `stop`: during a drain clients still get their answers."""

    def __init__(self, name: str, runner: web.BaseRunner, address: Address) -> None:
        self.name = name
        self._runner = runner
        self._address = address

    async def start(self) -> None:
        """Listen. Raises ConfigurationError when the address cannot be used."""
        await self._runner.setup()
        host = self._address.host or None
        try:
            await web.TCPSite(self._runner, host, self._address.port, backlog=1024).start()
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self._address} ({error.strerror or error}); "
                f"is another server running? Set {'OMNARA_LISTEN' if self.name == 'api' else 'OMNARA_OPS_LISTEN'}"
            ) from error
        log.info("listening", listener=self.name, addresses=[f"{found[0]}:{found[1]}" for found in self.addresses])

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports that are bound now."""
        return [(str(found[0]), int(found[1])) for found in self._runner.addresses]

    async def watch(self) -> None:
        """A listener does not fail by itself."""
        await asyncio.Event().wait()

    async def drain(self, deadline: Deadline) -> None:
        """Go on answering: new work is refused by the parts behind, and clients want to hear what became of theirs."""

    async def stop(self) -> None:
        """Close listener and connections."""
        await self._runner.cleanup()


OPS_CONNECTIONS: Final = 128
"""Far more than probes and scrapers open, and few enough that they cannot use up the process's open files."""


def api_limits(settings: Settings) -> ConnectionLimits:
    """Return what clients may take of the API's listener, as far as the limit of open files allows."""
    return ConnectionLimits(
        head_s=settings.request_head_timeout_s, connections=connection_cap(settings.max_connections)
    )


def ops_limits(settings: Settings) -> ConnectionLimits:
    """Return what clients may take of the ops listener, whose connections are counted apart from the API's."""
    return ConnectionLimits(head_s=settings.request_head_timeout_s, connections=OPS_CONNECTIONS)


def ops_listener(address: Address, metrics: Metrics, check: Check, limits: ConnectionLimits | None = None) -> Listener:
    """Return the listener with /healthz, /readyz and /metrics; start it first, so that a slow start can be seen."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Listener("ops", ApiRunner(build_ops_app(metrics, check, started_at=started_at), limits), address)
