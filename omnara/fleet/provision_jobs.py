"""One machine's place made, removed or woken under its claim: the calls to the provider, outside of any transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from omnara import probes
from omnara.db.provisioning import PlacedMachine
from omnara.engine.deps import Deps
from omnara.engine.machines import idle, provisioning
from omnara.engine.machines.provisioning import Times
from omnara.errors import Unavailable
from omnara.fleet.reached import Reached
from omnara.log import get_logger
from omnara.machines.providers.protocol import (
    HomeProvider,
    InvalidOptions,
    MachineSpec,
    ProviderUnavailable,
    ProvisionFailed,
    Resource,
)

__all__ = ["Jobs"]

log = get_logger(__name__)

REMOVE_S: Final = 60.0
WAKE_S: Final = 30.0


class Jobs:
    """What is done with claimed machines. Methods raise nothing but CancelledError: a claim runs out by itself."""

    def __init__(self, deps: Deps, reached: Reached, times: Times) -> None:
        self._deps = deps
        self._reached = reached
        self._times = times

    async def run(self, claimed: PlacedMachine) -> None:
        """Make or remove a claimed machine, whichever it is to be."""
        removing = claimed.lifecycle_state in ("deleting", "delete_failed")
        try:
            await (self._remove(claimed) if removing else self._make(claimed))
        except Unavailable as error:
            log.warning("what became of a machine could not be written", machine_id=str(claimed.id), error=str(error))
        except Exception as error:  # one machine's trouble is not the others'; its claim runs out
            log.error("work on a machine's place failed", machine_id=str(claimed.id), exc_info=error)

    async def _make(self, claimed: PlacedMachine) -> None:
        provider = self._reached.provider(claimed.provider)
        spec = await self._reached.spec(claimed)
        try:
            resource = await self._provision(provider, spec, claimed)
        except ProviderUnavailable as error:
            log.warning("a machine cannot be made now", machine_id=str(claimed.id), error=str(error))
            self._reached.lose(claimed.provider)
            await provisioning.put_off(self._deps, claimed, str(error), self._times)
        except (ProvisionFailed, InvalidOptions) as error:
            log.warning("a machine was not made", machine_id=str(claimed.id), error=str(error))
            made = error.resource if isinstance(error, ProvisionFailed) else None
            await provisioning.failed(self._deps, claimed, str(error), made, self._times)
        else:
            await self._made(provider, spec, claimed, resource)

    async def _provision(self, provider: HomeProvider, spec: MachineSpec, claimed: PlacedMachine) -> Resource:
        """Fetch what is needed, with all the time that takes, and make the place within the provider's limit."""
        async with self._held(claimed):
            await provider.prepare(spec)
        if not await provisioning.hold(self._deps, claimed, self._times):
            raise ProvisionFailed("the machine went another way")
        try:
            async with asyncio.timeout(provider.provision_timeout_s):
                return await provider.provision(spec)
        except TimeoutError as error:
            raise ProvisionFailed(f"it was not made within {provider.provision_timeout_s:.0f} s") from error

    async def _made(
        self, provider: HomeProvider, spec: MachineSpec, claimed: PlacedMachine, resource: Resource
    ) -> None:
        if await provisioning.completed(self._deps, claimed, resource):
            probes.hit("machine_made", machine_id=claimed.id, generation=claimed.generation)
            return
        # It is being removed, or was while this call went on: nobody else may know of what was made here.
        probes.hit("machine_made_too_late", machine_id=claimed.id)
        await provider.delete(spec, resource.resource_id)

    async def _remove(self, claimed: PlacedMachine) -> None:
        provider = self._reached.provider(claimed.provider)
        try:
            async with asyncio.timeout(REMOVE_S):
                await provider.delete(await self._reached.spec(claimed), claimed.resource_id)
        except (ProviderUnavailable, TimeoutError) as error:
            text = str(error) or "it was not removed in time"
            log.warning("a machine was not removed", machine_id=str(claimed.id), error=text)
            await provisioning.removal_failed(self._deps, claimed, text, self._times)
            return
        if await provisioning.removed(self._deps, claimed):
            probes.hit("machine_removed", machine_id=claimed.id)

    async def wake(self, machine: PlacedMachine) -> None:
        """Wake a sleeping machine that has something to do; one whose place is gone gets another."""
        try:
            if await self._woken(machine):
                await idle.woken(self._deps, machine)
                probes.hit("machine_woken", machine_id=machine.id)
            elif not await self._reached.replace_lost(machine):
                await idle.wake_failed(self._deps, machine)
        except Unavailable as error:
            log.warning("what became of a machine could not be written", machine_id=str(machine.id), error=str(error))
        except Exception as error:  # one machine's trouble is not the others'; its attempt runs out
            log.error("waking a machine failed", machine_id=str(machine.id), exc_info=error)

    async def _woken(self, machine: PlacedMachine) -> bool:
        try:
            async with asyncio.timeout(WAKE_S):
                provider = self._reached.provider(machine.provider)
                await provider.wake(await self._reached.spec(machine), machine.resource_id or "")
        except (ProviderUnavailable, TimeoutError) as error:
            log.warning("a machine was not woken", machine_id=str(machine.id), error=str(error))
            return False
        return True

    @asynccontextmanager
    async def _held(self, claimed: PlacedMachine) -> AsyncIterator[None]:
        """Extend the claim while something slow goes on. What the database does not hear of lapses."""

        async def hold() -> None:
            while True:
                await asyncio.sleep(self._times.claim_s / 3)
                try:
                    await provisioning.hold(self._deps, claimed, self._times)
                except Unavailable as error:
                    log.warning("a claim was not extended", machine_id=str(claimed.id), error=str(error))

        holding = asyncio.create_task(hold(), name=f"hold {claimed.id}")
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.wait((holding,))
