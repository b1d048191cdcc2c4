"""One pool machine, driven by this process: its home, a runtime over it, and the server's side of the channel.

The same code as for a daemon on somebody's computer, with two queues in the place of a socket and a function in that of
HTTP. So whatever happens to this process, the next driver registers, claims what the home has, and is told what to do
with it. Source: machines.md §5, §13 (the control plane as a machine's virtual daemon).
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from typing import Final
from uuid import UUID

from omnara import __version__, probes
from omnara.clock import Backoff
from omnara.db.fleet import Channel, MachineClaim
from omnara.engine.deps import Deps
from omnara.engine.machines import register
from omnara.engine.machines.register import NewRuntime, Registered
from omnara.errors import Gone, Unavailable
from omnara.fleet.places import Closable, Places
from omnara.fleet.sessions import Sessions
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.machines.link import LinkClosed, memory_link
from omnara.machines.processes import Home, HomeLost
from omnara.machines.providers.protocol import ProviderUnavailable
from omnara.machines.registration import Platform
from omnara.machines.runtime import Ended, Runtime

__all__ = ["BEAT_S", "Drive", "Turns"]

log = get_logger(__name__)

BEAT_S: Final = 45.0
"""Between two beats of a runtime in this process: they only show that its tasks are alive."""
TRIES: Final = 5
"""Failures in a row after which another replica may try its luck."""
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 5.0
LONGEST_OUTAGE_WAIT_S: Final = 2.0
RECONNECT_S: Final = 0.1
"""Between two channels of a runtime that is not at fault."""
MOVED_ON_S: Final = 0.5
"""The same when the machine has moved on: it is free again only for another container, or another claim."""
COOLING_S: Final = 15.0
"""How long a machine that could not be driven here is left to other replicas."""


class Turns:
    """How many machines of this process are opened at once, and how many register: these use the API's connections."""

    def __init__(self, *, homes: int = 8, registrations: int = 2) -> None:
        self.homes = asyncio.Semaphore(homes)
        self.registrations = asyncio.Semaphore(registrations)


class Drive:
    """Drives one claimed machine until it is cancelled, or until it cannot go on; then the claim is to be given back.

    `opened` is told of each new channel.
    """

    def __init__(
        self,
        deps: Deps,
        claim: MachineClaim,
        sessions: Sessions,
        places: Places,
        turns: Turns,
        opened: Callable[[Channel], None],
    ) -> None:
        self.claim = claim
        self._deps = deps
        self._sessions = sessions
        self._places = places
        self._turns = turns
        self._opened = opened
        self._failures = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._log = log.bind(machine_id=str(claim.machine_id), generation=claim.generation)

    async def run(self) -> float:
        """Drive until the claim is of no more use here; return the seconds for which it should not be taken again.

        That Postgres is away is no reason to give up. Raises nothing but CancelledError.
        """
        outage = Backoff(FIRST_WAIT_S, LONGEST_OUTAGE_WAIT_S)
        while self._failures.failures < TRIES:
            wait = self._failures
            try:
                home = await self._opened_home()
                if home is None:
                    return MOVED_ON_S
                await self._serve_and_close(home)
            except HomeLost as error:
                self._log.warning("a machine cannot be reached", error=str(error))
                if await self._mended():
                    return 0.0
            except Gone:
                return MOVED_ON_S
            except Unavailable as error:
                self._log.warning("a machine cannot be driven now", error=str(error))
                wait = outage
            except Exception as error:  # noqa: BLE001 - one machine's trouble is not the others'
                self._log.error("driving a machine failed", exc_info=error)
            await wait.wait()
        return COOLING_S

    async def _opened_home(self) -> Home | None:
        """Return the machine's processes; None when the machine or the claim has moved on."""
        try:
            async with self._turns.homes:
                return await self._places.open_home(self.claim)
        except LookupError:
            return None

    async def _mended(self) -> bool:
        try:
            return await self._places.mend(self.claim)
        except ProviderUnavailable as error:
            self._log.warning("a lost machine was not mended", error=str(error))
            return False
        except Exception as error:  # noqa: BLE001 - the machine stays offline, and is looked at again
            self._log.warning("a lost machine was not mended", exc_info=error)
            return False

    async def _serve_and_close(self, home: Home) -> None:
        instance_id = new_uuid()
        seen = Platform(os=platform.system().lower(), arch=platform.machine())
        runtime = Runtime(home, instance_id=instance_id, platform=seen)
        try:
            await self._serve(runtime, instance_id, seen)
        finally:
            try:
                await runtime.close()
            finally:  # also when it is canceled a second time meanwhile
                if isinstance(home, Closable):
                    await home.close()

    async def _serve(self, runtime: Runtime, instance_id: UUID, seen: Platform) -> None:
        """Register and serve until the server ends the runtime. Raises HomeLost, Gone, Unavailable."""
        while True:
            registered = await self._registered(runtime, instance_id, seen)
            await runtime.reconcile(registered.directives)
            async with self._sessions.channel(self.claim.machine_id, registered.runtime.id) as channel:
                self._opened(channel)
                self._failures.reset()
                probes.hit("machine_driven", machine_id=self.claim.machine_id, generation=self.claim.generation)
                ended = await self._converse(runtime, channel)
            if ended is not None:
                self._log.info("a driven runtime was ended", code=ended.code)
                return
            await asyncio.sleep(RECONNECT_S)

    async def _registered(self, runtime: Runtime, instance_id: UUID, seen: Platform) -> Registered:
        """Register with what the home has, again and again while Postgres is away. Raises HomeLost, Gone."""
        backoff = Backoff(FIRST_WAIT_S, LONGEST_OUTAGE_WAIT_S)
        while True:
            new = NewRuntime(
                machine_id=self.claim.machine_id,
                token_id=None,
                instance_id=instance_id,
                version=__version__,
                platform=seen,
                capacity={},
                claims=await runtime.claims(),
                driver=self.claim,
            )
            try:
                async with self._turns.registrations:
                    return await register.register(self._deps, new)
            except Unavailable as error:
                self._log.warning("a machine cannot be registered now", error=str(error))
            await backoff.wait()

    async def _converse(self, runtime: Runtime, channel: Channel) -> Ended | None:
        """Serve one channel from both ends; why the server ended the runtime, None for a channel that was closed."""
        ours, theirs = memory_link()
        session = asyncio.create_task(self._sessions.run(channel, ours, coarse_s=BEAT_S), name="driven-session")
        try:
            return await runtime.serve(theirs, round(BEAT_S * 1000))
        except LinkClosed:
            return None
        finally:
            # The line is closed by now, which ends the session as soon as it has noticed.
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
