"""Looks after pool machines that run a daemon themselves: nobody drives them, so nobody notices what becomes of them.

Only machines whose daemon is out of reach are looked at, and the provider says what became of their place: one that has
ended is made again, one that was suspended is asleep, one to which no daemon ever came is given up. One that runs is
left alone however long its line is down: its commands go on. Source: machines.md §4 (timers), §9, §12.
"""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

from omnara import probes
from omnara.db import provisioning as db
from omnara.db.provisioning import SilentDaemon
from omnara.engine.deps import Deps
from omnara.engine.machines import idle, provisioning
from omnara.engine.machines.provisioning import Times
from omnara.errors import Unavailable
from omnara.fleet.reached import Reached
from omnara.log import get_logger
from omnara.machines.providers.protocol import ProviderUnavailable

__all__ = ["OwnDaemons"]

log = get_logger(__name__)

ASK_S: Final = 30.0
"""For one answer of a provider, as for what is woken: beyond that its place counts as out of reach."""
_FIRST: Final = UUID(int=0)


class OwnDaemons:
    """One round per call, over the places of this process; several processes may look at once."""

    def __init__(self, deps: Deps, reached: Reached, times: Times) -> None:
        self._deps = deps
        self._reached = reached
        self._times = times
        self._after = _FIRST

    async def look(self) -> None:
        """Look at some machines whose daemon is out of reach, and at others next time. Raises Unavailable."""
        driven = set(self._reached.driven())
        reach = [pair for pair in self._reached.reach() if pair not in driven]
        if not reach:
            return
        async with self._deps.db.acquire() as connection:
            found = await db.silent_daemons(connection, reach, self._after, self._times.daemon_s)
        self._after = found[-1].machine.id if found else _FIRST
        lost: set[str] = set()
        for silent in found:
            if silent.machine.provider in lost:
                continue
            try:
                await self._judge(silent)
            except (ProviderUnavailable, TimeoutError) as error:
                log.warning(
                    "a machine's place does not tell of it", machine_id=str(silent.machine.id), error=str(error)
                )
                if self._reached.lose(silent.machine.provider, error):
                    lost.add(silent.machine.provider)
            except Unavailable:
                raise
            except Exception as error:  # one machine's trouble is not the others'
                log.error("looking at a machine failed", machine_id=str(silent.machine.id), exc_info=error)

    async def _judge(self, silent: SilentDaemon) -> None:
        machine = silent.machine
        async with asyncio.timeout(ASK_S), self._reached.asking(machine) as (provider, spec):
            state, _ = await provider.inspect(spec, machine.resource_id)
        if state == "terminated":
            await self._reached.replace(
                machine, "its sandbox ended and is replaced; what ran there is lost, as are files that it did not keep"
            )
        elif silent.never and silent.made_s > self._times.startup_s:
            why = "it was made, but no daemon connected from there"
            if await provisioning.give_up(self._deps, machine, why, self._times):
                log.warning("a machine is given up", machine_id=str(machine.id), why=why)
        elif state == "inactive" and machine.resource_id is not None:
            found = await idle.found_asleep(self._deps, machine)
            if found == "asleep":
                probes.hit("machine_found_asleep", machine_id=machine.id)
            elif found == "needed":
                async with asyncio.timeout(ASK_S), self._reached.asking(machine) as (provider, spec):
                    await provider.wake(spec, machine.resource_id)
