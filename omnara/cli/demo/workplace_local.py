"""A directory of this computer as the demo's machine: below the demo's own directory, so it is seen on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from omnara.cli.demo.plan import MachineKind
from omnara.clock import Deadline
from omnara.errors import ConfigurationError
from omnara.machines.providers.local import LocalProvider, Unconfined, confinement, host_id
from omnara.machines.providers.local_files import ABOUT, About
from omnara.machines.providers.protocol import MachineSpec, ProviderUnavailable
from omnara.testing.audit_commands import LEDGER

__all__ = ["LocalWorkplace"]

CLEANING_S: Final = 20.0


class LocalWorkplace:
    """A `Workplace` in the server's data directory. `allowed`: the setting for local machines."""

    kind: MachineKind = "local"

    def __init__(self, allowed: str) -> None:
        self._allowed = allowed
        self._data_dir: Path | None = None
        self.pool_config: Mapping[str, Any] = {}

    async def check(self) -> None:
        """See `Workplace`."""
        if self._allowed == "off":
            raise ConfigurationError("OMNARA_LOCAL_MACHINES is `off`")
        try:
            await asyncio.to_thread(confinement, unsafe=self._allowed == "unsafe")
        except Unconfined as error:
            raise ConfigurationError(str(error)) from error

    def environment(self) -> dict[str, str]:
        """See `Workplace`."""
        return {"OMNARA_LOCAL_MACHINES": self._allowed, "OMNARA_DOCKER_HOST": "off"}

    def begin(self, data_dir: Path) -> None:
        """See `Workplace`."""
        self._data_dir = data_dir

    async def ledger(self) -> list[str]:
        """See `Workplace`."""
        return await asyncio.to_thread(self._lines)

    def _lines(self) -> list[str]:
        ledgers = (machine / "workspace" / LEDGER for machine in self._machines())
        return [line for ledger in ledgers if ledger.exists() for line in ledger.read_text().splitlines()]

    def _machines(self) -> list[Path]:
        if self._data_dir is None:
            return []
        return sorted((self._data_dir / "local-machines" / "machines").glob("*"))

    async def left(self) -> list[str]:
        """See `Workplace`."""
        return [f"directory {machine.name}" for machine in await asyncio.to_thread(self._machines)]

    async def clean(self) -> None:
        """See `Workplace`. Ends what runs there; the directory itself goes with the demo's."""
        if self._data_dir is None or not await asyncio.to_thread(self._machines):
            return
        provider = LocalProvider(
            self._data_dir / "local-machines",
            host=await asyncio.to_thread(host_id, self._data_dir),
            confined=await asyncio.to_thread(confinement, unsafe=self._allowed == "unsafe"),
        )
        try:
            for machine in await asyncio.to_thread(self._machines):
                await _delete(provider, machine)
        finally:
            await provider.close()

    async def close(self) -> None:
        """See `Workplace`."""


async def _delete(provider: LocalProvider, machine: Path) -> None:
    about = msgspec.json.decode(await asyncio.to_thread((machine / ABOUT).read_bytes), type=About)
    spec = MachineSpec(machine_id=about.machine_id, installation_id=about.installation_id, allocation_name=machine.name)
    deadline = Deadline(CLEANING_S)
    while True:
        try:
            await provider.delete(spec, None)
            return
        except ProviderUnavailable:
            if deadline.passed:
                raise
            await asyncio.sleep(0.1)
