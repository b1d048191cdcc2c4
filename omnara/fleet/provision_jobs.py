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
from omnara.errors import Gone, Unavailable
from omnara.fleet.reached import Reached
from omnara.log import get_logger
from omnara.machines.providers.protocol import (
    DaemonAccess,
    HomeProvider,
    InvalidOptions,
    NotAdmitted,
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
        try:
            resource = await self._provision(claimed)
        except (ProvisionFailed, InvalidOptions, NotAdmitted) as error:
            log.warning("a machine was not made", machine_id=str(claimed.id), error=str(error))
            made = error.resource if isinstance(error, ProvisionFailed) else None
            await provisioning.failed(self._deps, claimed, str(error), made, self._times)
        except ProviderUnavailable as error:
            log.warning("a machine cannot be made now", machine_id=str(claimed.id), error=str(error))
            self._reached.lose(claimed.provider, error)
            await provisioning.put_off(self._deps, claimed, str(error), self._times)
        else:
            await self._made(claimed, resource)

    async def _provision(self, claimed: PlacedMachine) -> Resource:
        """Fetch what is needed, with all the time that takes, and make the place within the provider's limit."""
        async with self._held(claimed), self._reached.asking(claimed) as (provider, spec):
            await provider.prepare(spec)
        daemon = await self._begun(claimed)
        async with self._reached.asking(claimed, daemon) as (provider, spec):
            try:
                async with asyncio.timeout(provider.provision_timeout_s):
                    return await provider.provision(spec)
            except TimeoutError as error:
                raise ProvisionFailed(f"it was not made within {provider.provision_timeout_s:.0f} s") from error

    async def _begun(self, claimed: PlacedMachine) -> DaemonAccess | None:
        """Hold the claim, and return what a daemon of the machine's own needs."""
        driven = isinstance(self._reached.provider(claimed.provider), HomeProvider)
        url = "" if driven else self._reached.public_url()
        try:
            token = await provisioning.begin(self._deps, claimed, self._times, with_token=not driven)
        except Gone as error:
            raise ProvisionFailed(error.detail) from error
        return None if token is None else DaemonAccess(url, token.text)

    async def _made(self, claimed: PlacedMachine, resource: Resource) -> None:
        became = await provisioning.completed(self._deps, claimed, resource)
        if became == "active":
            probes.hit("machine_made", machine_id=claimed.id, generation=claimed.generation)
            return
        probes.hit("machine_made_too_late", machine_id=claimed.id)
        if became == "deleted":  # nobody else knows of what was made here
            async with self._reached.asking(claimed) as (provider, spec):
                await provider.delete(spec, resource.resource_id)

    async def _remove(self, claimed: PlacedMachine) -> None:
        try:
            async with asyncio.timeout(REMOVE_S), self._reached.asking(claimed) as (provider, spec):
                await provider.delete(spec, claimed.resource_id)
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
            if not isinstance(self._reached.provider(machine.provider), HomeProvider):
                await self._wake_daemon(machine)
            elif await self._woken(machine):
                await idle.woken(self._deps, machine)
                probes.hit("machine_woken", machine_id=machine.id)
            elif not await self._reached.replace_lost(machine):
                await idle.wake_failed(self._deps, machine)
        except Unavailable as error:
            log.warning("what became of a machine could not be written", machine_id=str(machine.id), error=str(error))
        except Exception as error:  # one machine's trouble is not the others'; its attempt runs out
            log.error("waking a machine failed", machine_id=str(machine.id), exc_info=error)

    async def _wake_daemon(self, machine: PlacedMachine) -> None:
        """Wake a machine whose daemon then registers, which is what ends the sleep: until then it is being woken."""
        try:
            async with asyncio.timeout(WAKE_S):
                if await self._reached.replace_lost(machine):
                    return
        except TimeoutError:
            log.warning("a sleeping machine's place does not tell of it", machine_id=str(machine.id))
        if await self._woken(machine):
            probes.hit("machine_woken", machine_id=machine.id)
        else:
            await idle.wake_failed(self._deps, machine)

    async def _woken(self, machine: PlacedMachine) -> bool:
        try:
            async with asyncio.timeout(WAKE_S), self._reached.asking(machine) as (provider, spec):
                await provider.wake(spec, machine.resource_id or "")
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
