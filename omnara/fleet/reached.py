"""The places that this replica reaches, and what drivers and the provisioner need of them.

A place is a provider together with the host it leads to: machines are bound to a host, since another replica's engine
is another one. A place that cannot be asked is not reached, so nobody claims its machines in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from omnara import probes
from omnara.clock import monotonic
from omnara.db import provisioning as db
from omnara.db.fleet import MachineClaim
from omnara.db.provisioning import PlacedMachine
from omnara.engine.deps import Deps
from omnara.engine.machines import provisioning
from omnara.engine.machines.installation import installation_id
from omnara.engine.machines.provider_credentials import credential_for
from omnara.engine.machines.provisioning import Times, spec_of
from omnara.errors import ConfigurationError
from omnara.fleet.confidence import confidential
from omnara.log import get_logger
from omnara.machines.daemon.config import checked_url
from omnara.machines.processes import Home, HomeLost
from omnara.machines.providers.places import Site
from omnara.machines.providers.protocol import (
    DaemonAccess,
    HomeProvider,
    MachineSpec,
    NotAdmitted,
    Provider,
    ProviderUnavailable,
)

__all__ = ["Reached"]

log = get_logger(__name__)


class Reached:
    """`Places` over some sites. `worker_id` tells this process's identity at the moment."""

    def __init__(self, deps: Deps, sites: Sequence[Site], worker_id: Callable[[], UUID], times: Times) -> None:
        self._deps = deps
        self._sites = tuple(sites)
        self._worker_id = worker_id
        self._times = times
        self._providers: dict[str, Provider] = {}
        self._hosts: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._installation: UUID | None = None
        self._silent: dict[UUID, tuple[float, float]] = {}
        """Machines that were found silent: since when, and when last."""

    def reach(self) -> Sequence[tuple[str, str]]:
        """Return pairs of provider and host, as machines name them, of all places."""
        return tuple(self._hosts.items())

    def driven(self) -> Sequence[tuple[str, str]]:
        """See `Places`."""
        return tuple(pair for pair in self._hosts.items() if isinstance(self._providers[pair[0]], HomeProvider))

    def provider(self, name: str) -> Provider:
        """Return a provider by the name that pools give. Raises LookupError for one that was never reached."""
        return self._providers[name]

    async def refresh(self) -> None:
        """Open the sites that are not reached."""
        for site in self._sites:
            if site.name in self._hosts:
                continue
            try:
                provider, host = await site.open()
                if not isinstance(provider, HomeProvider):
                    self.public_url()
            except ProviderUnavailable as error:
                self._tell(site.name, str(error))
            except Exception as error:  # one provider's mistake is not the others'
                if self._tell(site.name, str(error)):
                    log.error("a place for machines failed", provider=site.name, exc_info=error)
            else:
                self._providers[site.name], self._hosts[site.name] = provider, host
                self._problems.pop(site.name, None)
                log.info("machines can be made", provider=site.name, host=self._hosts[site.name])

    def public_url(self) -> str:
        """Return where daemons in machines of pools find this server. Raises ProviderUnavailable while they cannot."""
        if self._deps.settings.public_url is None:
            raise ProviderUnavailable("OMNARA_PUBLIC_URL is not set: the daemons there could not find this server")
        try:
            return checked_url(self._deps.settings.public_url)
        except ConfigurationError as error:
            raise ProviderUnavailable(f"OMNARA_PUBLIC_URL is of no use to daemons: {error}") from error

    def _tell(self, name: str, problem: str) -> bool:
        """Say once why a site is out of reach: most servers have no engine, and need none. True when it was new."""
        if self._problems.get(name) == problem:
            return False
        self._problems[name] = problem
        log.info("no machines of a provider can be made here", provider=name, why=problem)
        return True

    def lose(self, name: str, why: Exception) -> bool:
        """A place did not answer: it is asked who it is before anything else. False if it only refused one pool."""
        if isinstance(why, NotAdmitted):
            return False
        self._hosts.pop(name, None)
        return True

    async def installation(self) -> UUID:
        """Return the installation's id; read once. Raises Unavailable."""
        if self._installation is None:
            self._installation = await installation_id(self._deps)
        return self._installation

    @asynccontextmanager
    async def asking(
        self, machine: PlacedMachine, daemon: DaemonAccess | None = None
    ) -> AsyncIterator[tuple[Provider, MachineSpec]]:
        """A machine's provider, and what it has to know for a call that is made now; of what is secret in that, nothing
        is in the errors that come of the call.

        Raises NotAdmitted when the pool's credential is not to be had, Unavailable, and LookupError as `provider`.
        """
        provider = self.provider(machine.provider)
        spec = spec_of(await self.installation(), machine, await credential_for(self._deps, machine.id), daemon)
        with confidential(spec):
            yield provider, spec

    async def open_home(self, claim: MachineClaim) -> Home:
        """See `Places`."""
        machine = await self._claimed(claim)
        if machine is None or machine.resource_id is None:
            raise LookupError("the machine has moved on")
        try:
            async with self.asking(machine) as (provider, spec):
                assert isinstance(provider, HomeProvider), "only such machines are driven"
                return await provider.open_home(spec, machine.resource_id)
        except ProviderUnavailable as error:
            raise HomeLost(str(error)) from error

    async def mend(self, claim: MachineClaim) -> bool:
        """See `Places`. Only a container that is gone is replaced at once; one that is silent, after a while."""
        machine = await self._claimed(claim)
        if machine is None:
            return True
        async with self.asking(machine) as (provider, spec):
            state, _ = await provider.inspect(spec, machine.resource_id)
            if state == "inactive" and machine.resource_id is not None:
                await provider.wake(spec, machine.resource_id)
                return False
        if state != "terminated" and not self._stuck(machine.id, running=state == "running"):
            return False
        self._silent.pop(machine.id, None)
        why = "its container ended" if state == "terminated" else "its container did not answer"
        return await self.replace(machine, _lost(why))

    async def replace_lost(self, machine: PlacedMachine) -> bool:
        """Replace a sleeping machine's place if it is gone; False when it is there, or nobody can tell."""
        try:
            async with self.asking(machine) as (provider, spec):
                state, _ = await provider.inspect(spec, machine.resource_id)
        except ProviderUnavailable as error:
            self.lose(machine.provider, error)
            return False
        return state == "terminated" and await self.replace(machine, _lost("its container ended while it slept"))

    async def replace(self, machine: PlacedMachine, why: str) -> bool:
        """Let the next generation of a machine's place be made; False when somebody did that already."""
        done = await provisioning.replace(self._deps, machine, why)
        if done:
            probes.hit("machine_replaced", machine_id=machine.id)
            log.warning("a machine is replaced", machine_id=str(machine.id), generation=machine.generation, why=why)
        return done

    def _stuck(self, machine_id: UUID, *, running: bool) -> bool:
        """True for a machine that runs and could not be spoken to for long, time after time.

        One that was well in between begins anew: two short silences must not cost it what runs there.
        """
        now = monotonic()
        well_s = self._times.stuck_s * 0.8
        self._silent = {each: times for each, times in self._silent.items() if now - times[1] <= well_s}
        if not running:
            return False
        since, _ = self._silent.get(machine_id, (now, now))
        self._silent[machine_id] = (since, now)
        return now - since > self._times.stuck_s

    async def _claimed(self, claim: MachineClaim) -> PlacedMachine | None:
        async with self._deps.db.acquire() as connection:
            machine = await db.machine_at(connection, claim.machine_id)
        if machine is None or machine.lifecycle_state != "active":
            return None
        fence = (machine.claim_token, machine.generation)
        return machine if fence == (claim.claim_token, claim.generation) else None

    async def close(self) -> None:
        """Let go of all places."""
        await asyncio.gather(*(site.close() for site in self._sites))


def _lost(why: str) -> str:
    return f"{why} and was replaced; what ran in it is lost, its files in the agent's directory are there"
