"""The processes of a home as this runtime lives with them: prepared, granted, run and watched, ended, released.

Nothing here knows of a connection. What is to be told goes into the outbox; what must not be lost is in the home.
Source: machines.md §4 (daemon sequence), §6 (when which report is sent).
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from typing import Any, Final

from omnara.clock import Deadline
from omnara.log import get_logger
from omnara.machines import wire
from omnara.machines.processes import Home, HomeFull, ProcessRecord, StartFailed
from omnara.machines.runtime.kept import Kept
from omnara.machines.runtime.offered import spec_of
from omnara.machines.runtime.outbox import Outbox
from omnara.machines.runtime.reports import lost_event, never_started, started_event, storage_event
from omnara.machines.runtime.tasks import Tasks
from omnara.machines.runtime.timing import Timing

__all__ = ["Life", "Lives"]

log = get_logger(__name__)

_NEVER: Final = 2**63 - 1
"""An output offset that is never reached: a watch with it returns for the end alone."""


class Life:
    """One process that is not settled. `fault` is the report of one that is not in the home because it cannot start."""

    __slots__ = ("doomed", "fault", "granted", "over", "process_id", "released", "running", "stopping", "wait_s")

    def __init__(self, process_id: str, wait_s: float) -> None:
        self.process_id = process_id
        self.wait_s = wait_s
        self.granted = False
        self.running = False
        self.over = False
        self.doomed = False
        self.released = False
        self.stopping = False
        self.fault: wire.ProcessFinished | None = None


class Lives:
    """All processes of one home. One instance per runtime; its tasks live as long as the runtime."""

    def __init__(self, home: Home, outbox: Outbox, timing: Timing, tasks: Tasks) -> None:
        self._home = home
        self._outbox = outbox
        self._timing = timing
        self._tasks = tasks
        self._lives: dict[str, Life] = {}
        self.kept = Kept(timing.keep_settled)
        """Processes that are in the home, also those that are over: what can be read."""

    @property
    def live(self) -> list[Life]:
        """The processes that are not settled yet."""
        return list(self._lives.values())

    def get(self, process_id: str) -> Life | None:
        """Return the process if it is not settled."""
        return self._lives.get(process_id)

    # --- handing over ---------------------------------------------------------------------------------------

    async def prepare(self, offer: wire.ProcessOffer) -> bool:
        """Make an offered process durable; True when its grant is to be asked for. Known ones are left alone.

        What cannot be started asks for its grant as well, and is reported as failed after it. A full disk is reported
        at once. May be cancelled. Raises HomeLost.
        """
        if offer.process_id in self._lives or offer.process_id in self.kept:
            return False
        life = self._lives[offer.process_id] = Life(offer.process_id, min(offer.wait_ms, wire.MAX_WAIT_MS) / 1000)
        try:
            spec = spec_of(offer)
            await self._home.prepare(spec)
        except StartFailed as error:
            life.fault = never_started(offer.process_id, "start_failed", str(error))
        except HomeFull:
            life.over = True
            self._outbox.add(offer.process_id, "exit", "connection", storage_event(offer.process_id))
            return False
        except BaseException:
            del self._lives[offer.process_id]
            raise
        else:
            self.kept.add(offer.process_id)
        return True

    def grant(self, process_id: str) -> bool:
        """Run a process whose grant has come; False when there is none to be run. Again for the same one: nothing."""
        life = self._lives.get(process_id)
        if life is not None and life.granted:
            return True
        if life is None or life.over:
            return False
        life.granted = True
        if life.doomed and life.fault is None:
            # Never begun: what is in the home goes with it, and only this runtime remembers that it is to be reported.
            life.fault = never_started(process_id, "terminated_before_start", "it was to be ended before it began")
            self._spawn(self._forget(process_id), "forget")
        if life.fault is not None:
            life.over = True
            self._outbox.add(process_id, "exit", "memory", life.fault)
        else:
            self.start(life)
        return True

    async def close_preparation(self, process_id: str) -> None:
        """Remove a process that was not granted, and will not be. Raises HomeLost."""
        life = self._lives.get(process_id)
        if life is not None and (life.running or life.over):
            return
        # Known until it is gone, so that the same process cannot be prepared anew while its files are being removed.
        self._lives[process_id] = life = Life(process_id, 0.0)
        life.over = True
        self._outbox.discard(process_id)
        try:
            await self._forget(process_id)
        finally:
            del self._lives[process_id]

    def line_lost(self) -> None:
        """Drop what only the lost line knew: the server offers it again."""
        for life in self.live:
            ungranted_fault = life.fault is not None and not life.granted
            if ungranted_fault or (life.over and self._outbox.find(life.process_id, "exit") is None):
                del self._lives[life.process_id]

    # --- running --------------------------------------------------------------------------------------------

    def start(self, life: Life) -> None:
        """Run a granted process in the background: at most once, whatever is asked."""
        if life.running or life.over:
            return
        life.granted = life.running = True
        self._spawn(self._run(life), f"run {life.process_id}")

    def start_again(self, record: ProcessRecord) -> None:
        """Run a process whose grant got lost on the way: prepared by this runtime or by an earlier one."""
        life = self._lives.setdefault(record.process_id, Life(record.process_id, self._timing.restart_wait_s))
        life.granted = False
        self.grant(record.process_id)

    def follow(self, record: ProcessRecord) -> None:
        """Go on with a process that runs since an earlier runtime, in the background."""
        life = self._lives.setdefault(record.process_id, Life(record.process_id, self._timing.restart_wait_s))
        if not life.running and not life.over:
            life.granted = life.running = True
            self._spawn(self._resume(life, record), f"follow {record.process_id}")

    async def _run(self, life: Life) -> None:
        deadline = Deadline(life.wait_s)
        try:
            record = await self._home.execute(life.process_id, life.wait_s)
            await self._follow(life, await self._settle(record, deadline), told=False)
        except KeyError:
            self._lost(life)
        except HomeFull:
            life.over = True
            # Not kept: after a reconnection it is claimed as prepared, and the server decides anew.
            self._outbox.add(life.process_id, "exit", "connection", storage_event(life.process_id))
        finally:
            life.running = False

    async def _resume(self, life: Life, record: ProcessRecord) -> None:
        """Follow a process of an earlier runtime; a call that waits for it gets its first output, as it would have."""
        told = record.started_acknowledged
        deadline = Deadline(life.wait_s)
        try:
            if not told and record.exit is None and record.supervisor_live:
                if record.output_end == 0:
                    record = await self._home.watch(life.process_id, 0, life.wait_s)
                record = await self._settle(record, deadline)
            await self._follow(life, record, told=told)
        except KeyError:
            self._lost(life)
        finally:
            life.running = False

    async def _settle(self, record: ProcessRecord, deadline: Deadline) -> ProcessRecord:
        """After the first output, give the end a moment: most commands say one thing and are over."""
        if record.exit is not None or record.output_end == 0:
            return record
        return await self._home.watch(record.process_id, _NEVER, min(self._timing.settle_s, deadline.remaining_s))

    async def _follow(self, life: Life, record: ProcessRecord, *, told: bool) -> None:
        """Tell that a process runs, unless that was told, wait for its end, and tell that."""
        try:
            while record.exit is None:
                if record.execution_committed and not record.supervisor_live:
                    log.warning("the keeper of a command is gone", process_id=life.process_id)
                    await self._home.stop(life.process_id, "supervisor_lost")
                elif not told and not life.released:
                    event = await started_event(self._home, record)
                    self._outbox.add(life.process_id, "started", "home", event)
                    told = True
                record = await self._home.watch(life.process_id, _NEVER, self._timing.watch_s)
        except KeyError:
            self._lost(life)
            return
        finally:
            life.running = False
        life.over = True
        if not life.released:
            self._outbox.add(life.process_id, "exit", "home", ended=record.exit)

    def _lost(self, life: Life) -> None:
        life.over = True
        self.kept.discard(life.process_id)
        if not life.released:
            self._outbox.add(life.process_id, "exit", "connection", lost_event(life.process_id))

    # --- ending ---------------------------------------------------------------------------------------------

    def terminate(self, process_id: str) -> None:
        """End a process because the server says so, in the background. One that was not granted is doomed if it is."""
        life = self._lives.get(process_id)
        if life is None or life.over:
            return
        if not life.granted:
            life.doomed = True
        elif not life.released and not life.stopping:
            life.stopping = True
            self._spawn(self._stop(process_id, "terminated_by_server"), f"stop {process_id}")

    async def _stop(self, process_id: str, reason_code: str) -> None:
        try:
            with contextlib.suppress(HomeFull):  # it is ended all the same, and its end is found by the watch
                await self._home.stop(process_id, reason_code)
        finally:
            if (life := self._lives.get(process_id)) is not None:
                life.stopping = False

    async def acknowledge(self, process_id: str, slot: str) -> None:
        """Keep that the server has a report. On a full disk it is not kept: a later runtime reports it once more."""
        with contextlib.suppress(HomeFull):
            await self._home.acknowledge(process_id, slot)

    def release(self, record: ProcessRecord) -> None:
        """Let go of a process that the server has settled without us: stopped if it runs, and never reported."""
        life = self._lives.setdefault(record.process_id, Life(record.process_id, 0.0))
        if life.released:
            return
        life.released = True
        self._outbox.discard(record.process_id)
        self._spawn(self._release(record), f"release {record.process_id}")

    async def _release(self, record: ProcessRecord) -> None:
        if not record.execution_committed and record.exit is None:
            self._lives.pop(record.process_id, None)
            await self._forget(record.process_id)
            return
        if record.exit is None:
            await self._stop(record.process_id, "server_resolved")
        for action in record.actions:
            if not action.acknowledged:
                await self.acknowledge(record.process_id, action.action_id)
        await self.acknowledge(record.process_id, "exit")
        self.settled(record.process_id)

    def settled(self, process_id: str) -> None:
        """The server has the end of a process: only its output is of interest from now on, and not for ever."""
        self._lives.pop(process_id, None)
        self.kept.settle(process_id)
        self.prune()

    def prune(self) -> None:
        """Forget, in the background, the oldest processes beyond what is kept."""
        for process_id in self.kept.too_many():
            self._spawn(self._forget(process_id), f"forget {process_id}")

    def ended_before(self, process_id: str) -> None:
        """Report the end of a process that was over before this runtime looked."""
        life = self._lives.setdefault(process_id, Life(process_id, 0.0))
        life.granted = life.over = True
        self._outbox.add(process_id, "exit", "home")

    async def _forget(self, process_id: str) -> None:
        self.kept.discard(process_id)
        try:
            await self._home.forget(process_id)
        except ValueError as error:  # something of it still runs; the next registration finds it again
            log.warning("a process is not forgotten yet", process_id=process_id, error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.spawn(work, name)
