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

from omnara import __version__, probes
from omnara.clock import Backoff
from omnara.db.fleet import Channel, MachineClaim
from omnara.engine.deps import Deps
from omnara.engine.machines import register
from omnara.engine.machines.register import NewRuntime
from omnara.errors import Gone, Unavailable
from omnara.fleet.places import Closable, Places
from omnara.fleet.sessions import Sessions
from omnara.ids import new_uuid
from omnara.log import get_logger
from omnara.machines.link import LinkClosed, memory_link
from omnara.machines.processes import Home, HomeLost
from omnara.machines.registration import Platform
from omnara.machines.runtime import Ended, Runtime

__all__ = ["BEAT_S", "Drive"]

log = get_logger(__name__)

BEAT_S: Final = 45.0
"""Between two beats of a runtime in this process: they only show that its tasks are alive."""
TRIES: Final = 5
"""Failures in a row after which another replica may try its luck."""
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 5.0
MOVED_ON_S: Final = 0.5
"""The same when the machine has moved on: it is free again only for another container, or another claim."""
COOLING_S: Final = 15.0
"""How long a machine that could not be driven here is left to other replicas."""


class Drive:
    """Drives one claimed machine until it is cancelled, or until it cannot go on; then the claim is to be given back.

    `turn` bounds how many machines of this process register at once. `opened` is told of each new channel.
    """

    def __init__(
        self,
        deps: Deps,
        claim: MachineClaim,
        sessions: Sessions,
        places: Places,
        turn: asyncio.Semaphore,
        opened: Callable[[Channel], None],
    ) -> None:
        self.claim = claim
        self._deps = deps
        self._sessions = sessions
        self._places = places
        self._turn = turn
        self._opened = opened

    async def run(self) -> float:
        """Drive until the claim is of no more use here; return the seconds for which it should not be taken again.

        Raises nothing but CancelledError.
        """
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        while backoff.failures < TRIES:
            try:
                async with self._turn:
                    home = await self._places.open_home(self.claim)
                try:
                    await self._serve(home, backoff)
                finally:
                    if isinstance(home, Closable):
                        await home.close()
            except HomeLost as error:
                log.warning("a machine cannot be reached", machine_id=str(self.claim.machine_id), error=str(error))
                if await self._mended():
                    return 0.0
            except (Gone, LookupError):
                return MOVED_ON_S
            except Unavailable as error:
                log.warning("a machine cannot be driven now", machine_id=str(self.claim.machine_id), error=str(error))
            except Exception as error:  # one machine's trouble is not the others'
                log.error("driving a machine failed", machine_id=str(self.claim.machine_id), exc_info=error)
            await backoff.wait()
        return COOLING_S

    async def _mended(self) -> bool:
        try:
            return await self._places.mend(self.claim)
        except Exception as error:  # the machine stays offline, and is looked at again
            log.warning("a lost machine was not mended", machine_id=str(self.claim.machine_id), exc_info=error)
            return False

    async def _serve(self, home: Home, backoff: Backoff) -> None:
        """Register and serve until the server ends the runtime. Raises HomeLost, Gone, Unavailable."""
        instance_id = new_uuid()
        seen = Platform(os=platform.system().lower(), arch=platform.machine())
        runtime = Runtime(home, instance_id=instance_id, platform=seen)
        try:
            ended: Ended | None = None
            while ended is None:
                async with self._turn:
                    new = NewRuntime(
                        machine_id=self.claim.machine_id,
                        token_id=None,
                        instance_id=instance_id,
                        version=__version__,
                        platform=seen,
                        capacity={},
                        claims=await runtime.claims(),
                    )
                    registered = await register.register(self._deps, new)
                await runtime.reconcile(registered.directives)
                async with self._sessions.channel(self.claim.machine_id, registered.runtime.id) as channel:
                    self._opened(channel)
                    backoff.reset()
                    probes.hit("machine_driven", machine_id=self.claim.machine_id, generation=self.claim.generation)
                    ended = await self._converse(runtime, channel)
            log.info("a driven runtime was ended", machine_id=str(self.claim.machine_id), code=ended.code)
        finally:
            await runtime.close()

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
