"""The runtime as its owner uses it: claim, reconcile, serve one connection after the other, and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from uuid import UUID

from omnara.log import get_logger
from omnara.machines import wire
from omnara.machines.link import Link
from omnara.machines.processes import Home, HomeFull, HomeLost, ProcessRecord
from omnara.machines.runtime.actions import Action, Actions
from omnara.machines.runtime.claims import check_directives, claim, settled
from omnara.machines.runtime.connection import Connection, Ended
from omnara.machines.runtime.lives import Lives
from omnara.machines.runtime.outbox import Outbox
from omnara.machines.runtime.tasks import Tasks
from omnara.machines.runtime.timing import Timing

__all__ = ["Runtime"]

log = get_logger(__name__)


class Runtime:
    """Runs the commands of one home for one server. Used by one task, in this order, as often as needed:

    `claims`, then `reconcile` with the answer, then `serve`; at the end `close` (processes run on) or `destroy`.
    """

    def __init__(
        self,
        home: Home,
        *,
        instance_id: UUID,
        platform: wire.Platform | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._home = home
        self._timing = timing or Timing()
        self._heartbeat = wire.Heartbeat(daemon_instance_id=str(instance_id), observed_platform=platform)
        self._tasks = Tasks()
        self._outbox = Outbox(self._timing.resend_s)
        self._lives = Lives(home, self._outbox, self._timing, self._tasks)
        self._actions = Actions(home, self._outbox, self._lives, self._tasks)
        self._claimed: dict[str, str] = {}
        self._records: dict[str, ProcessRecord] = {}
        self._connection: Connection | None = None

    @property
    def busy(self) -> bool:
        """True while a process is not settled, a report is not acknowledged or something is under way.

        A runtime that is not busy can be put to sleep without anybody missing it. Source: machines.md §9.
        """
        connection = self._connection
        return bool(
            any(not life.released for life in self._lives.live)
            or self._outbox.pending
            or len(self._tasks)
            or (connection is not None and connection.busy)
        )

    async def claims(self) -> list[wire.ProcessClaim]:
        """Return one claim for each process that the server may have to hear of. Between connections only.

        Actions that were begun are waited for (at most `quiesce_s`), so that none goes on unclaimed. Raises HomeLost.
        """
        if self._actions.under_way:
            await asyncio.wait(self._actions.under_way, timeout=self._timing.quiesce_s)
        with contextlib.suppress(HomeLost):  # what failed while the home was away is claimed now
            self._tasks.take_failure()
        records = await self._home.processes()
        self._lives.kept.replace(
            (record.process_id for record in records),
            (record.process_id for record in records if settled(record)),
        )
        self._lives.prune()
        self._records = {
            record.process_id: record
            for record in records
            if not settled(record) or self._lives.kept.doubted(record.process_id)
        }
        claims = [claim(record) for record in self._records.values()]
        claims += [
            _memory_claim(life.process_id)
            for life in self._lives.live
            if life.fault is not None and life.process_id not in self._records
        ]
        self._claimed = {one.process_id: one.supervisor_instance_id for one in claims}
        return claims

    async def reconcile(self, directives: Sequence[wire.ProcessDirective]) -> None:
        """Do what the server answered to the last claims. What takes long goes on in the background.

        Raises DirectivesRefused before anything is done, and HomeLost.
        """
        check_directives(self._claimed, directives)
        self._outbox.unpark()
        for directive in directives:
            record = self._records.get(directive.process_id)
            if record is None:
                self._reconcile_fault(directive)
                continue
            await self._reconcile_process(directive, record)
            if directive.disposition in ("start", "retain"):
                await self._reconcile_actions(directive, record)
        self._records = {}

    def _reconcile_fault(self, directive: wire.ProcessDirective) -> None:
        if directive.disposition in ("close_preparation", "release"):
            self._outbox.discard(directive.process_id)
            self._lives.settled(directive.process_id)

    async def _reconcile_process(self, directive: wire.ProcessDirective, record: ProcessRecord) -> None:
        match directive.disposition:
            case "close_preparation":
                await self._lives.close_preparation(record.process_id)
            case "start":
                self._lives.start_again(record)
            case "retain" if record.exit is not None:
                if not record.exit_acknowledged:
                    self._lives.ended_before(record.process_id)
            case "retain":
                self._lives.follow(record)
            case "release":
                self._lives.release(record)

    async def _reconcile_actions(self, directive: wire.ProcessDirective, record: ProcessRecord) -> None:
        known = {action.action_id: action for action in record.actions}
        for one in sorted(directive.actions, key=lambda action: action.seq):
            marked = known.get(one.process_action_id)
            if one.disposition == "apply" and one.action_kind != "read":
                action = Action(
                    process_id=record.process_id,
                    action_id=one.process_action_id,
                    kind=one.action_kind,
                    seq=one.seq,
                    payload=one.payload,
                )
                self._actions.begin(action)
            elif marked is None or marked.acknowledged:
                continue
            elif one.disposition in ("retain", "settle"):
                self._actions.recall(record.process_id, marked)
            elif one.disposition == "release":
                await self._lives.acknowledge(record.process_id, marked.action_id)

    async def serve(self, link: Link[wire.FromDaemon, wire.FromServer], first_beat_ms: int) -> Ended:
        """Serve one connection until the server ends this runtime. Raises LinkClosed (connect again), HomeLost.

        Commands run on, whatever ends it; their reports wait for the next connection.
        """
        connection = Connection(link, self._home, self._outbox, self._lives, self._actions, self._timing)
        self._connection = connection
        try:
            return await connection.run(self._heartbeat, first_beat_ms, self._tasks.watch())
        finally:
            self._connection = None
            self._outbox.line_lost()
            self._lives.line_lost()

    async def close(self) -> None:
        """End this runtime and leave all processes as they are, for the next one."""
        await self._tasks.close()

    async def destroy(self, reason_code: str) -> None:
        """End every process and remove everything that is kept of them: this machine is not ours any more.

        Goes on past a home that fails for one process. Raises HomeLost when the home cannot be reached at all.
        """
        await self._tasks.close()
        records = await self._home.processes()
        await asyncio.gather(*(self._destroy(record, reason_code) for record in records))

    async def _destroy(self, record: ProcessRecord, reason_code: str) -> None:
        try:
            if record.exit is None:
                await self._home.stop(record.process_id, reason_code)
            await self._home.forget(record.process_id)
        except (HomeLost, HomeFull, ValueError, OSError) as error:
            log.warning("a process could not be removed", process_id=record.process_id, error=str(error))


def _memory_claim(process_id: str) -> wire.ProcessClaim:
    """The claim for a process that was granted and could not begin: it is over, and its report waits."""
    return wire.ProcessClaim(
        process_id=process_id,
        supervisor_instance_id="none",
        phase="terminal",
        supervisor_live=False,
        execution_committed=False,
        action_admission_closed=True,
        resolved_action_seq=0,
    )
