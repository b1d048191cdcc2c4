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
        """Make a place. Whoever lost the claim meanwhile changes nothing, and leaves nothing behind that is nobody's.

        A late attempt makes nothing twice: a machine's place has one name for ever, which is taken or free at the
        provider, so it finds what another attempt made, or makes what that one will find.
        """
        made: Resource | None = None
        try:
            made = await self._provision(claimed)
            became = await provisioning.completed(self._deps, claimed, made)
            done = "machine_made" if became == "active" else "machine_made_too_late"
            probes.hit(done, machine_id=claimed.id, generation=claimed.generation)
        except Gone:
            log.info("a machine went another way before it was made", machine_id=str(claimed.id))
            await provisioning.give_back(self._deps, claimed)
            return
        except (ProvisionFailed, InvalidOptions, NotAdmitted) as error:
            log.warning("a machine was not made", machine_id=str(claimed.id), error=str(error))
            made = error.resource if isinstance(error, ProvisionFailed) else None
            became = await provisioning.failed(self._deps, claimed, str(error), made, self._times)
        except ProviderUnavailable as error:
            log.warning("a machine cannot be made now", machine_id=str(claimed.id), error=str(error))
            self._reached.lose(claimed.provider, error)
            became = await provisioning.put_off(self._deps, claimed, str(error), self._times)
        if became == "unwanted":
            await self._discard(claimed, made)

    async def _provision(self, claimed: PlacedMachine) -> Resource:
        """Fetch what is needed, with all the time that takes, and make the place within the provider's limit.

        Raises Gone when the claim was lost before anything was made.
        """
        async with self._held(claimed):
            async with self._reached.asking(claimed) as (provider, spec):
                await provider.prepare(spec)
            daemon = await self._begun(claimed)
            async with self._reached.asking(claimed, daemon) as (provider, spec):
                try:
                    async with asyncio.timeout(provider.provision_timeout_s):
                        return await provider.provision(spec)
                except TimeoutError as error:
                    raise ProvisionFailed(f"it was not made within {provider.provision_timeout_s:.0f} s") from error

    async def _begun(self, claimed: PlacedMachine) -> DaemonAccess | None:
        """Hold the claim, and return what a daemon of the machine's own needs. Raises Gone."""
        driven = isinstance(self._reached.provider(claimed.provider), HomeProvider)
        url = "" if driven else self._reached.public_url()
        token = await provisioning.begin(self._deps, claimed, self._times, with_token=not driven)
        return None if token is None else DaemonAccess(url, token.text)

    async def _discard(self, claimed: PlacedMachine, made: Resource | None) -> None:
        """Remove what was made, or begun, for a machine that nobody will make or remove again.

        Once, since there is no row any more that says so. Where that fails, what is left is found by providers that can
        tell what they have (`SweptProvider`), and by no others.
        """
        try:
            async with asyncio.timeout(REMOVE_S), self._reached.asking(claimed) as (provider, spec):
                await provider.delete(spec, None if made is None else made.resource_id)
        except (ProviderUnavailable, TimeoutError) as error:
            log.warning(
                "what was made for a deleted machine is left behind",
                machine_id=str(claimed.id),
                resource=None if made is None else made.resource_id,
                error=str(error),
            )

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
        """Wake a sleeping machine that has something to do; one whose place is gone gets another.

        Whoever does it late wakes nothing for good: the row then says so as well (`idle.woken`), so it is driven, and
        sleeps again when it is idle. What was replaced meanwhile is not there to be woken.
        """
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
        """Extend the claim while something slow goes on. What the database does not hear of lapses.

        Nothing is stopped when it is lost. An image that is fetched then is of use to all machines and changes none,
        and before more is done the claim is asked for again (`_begun`). A place that is being made is seen through, so
        that `_make` knows what was made, and whose it is.
        """

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
