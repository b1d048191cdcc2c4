"""The server's side of one channel to a machine: hands over what is queued, and takes what is reported.

Nothing is remembered here that decides anything: an offer is only an invitation, the grant is one conditional update in
the database, and a channel that is not the machine's current one is told so by every statement it makes.
Source: machines.md §3 (frames, drain, heartbeat), §4 (handing work over once), §14 rows 9 and 10.
"""

from __future__ import annotations

import asyncio
from typing import Final, assert_never
from uuid import UUID

from omnara.clock import monotonic
from omnara.db.fleet import Channel
from omnara.domain.processes import OFFERED_ACTIONS, OFFERED_PROCESSES
from omnara.engine.deps import Deps
from omnara.engine.machines import accept, offers, reports, runtimes
from omnara.errors import Unavailable
from omnara.fleet.answers import instance_of, invalid, unavailable, unfit
from omnara.fleet.outstanding import Outstanding
from omnara.fleet.strays import Strays
from omnara.ids import IdKind, InvalidPublicId, decode, encode
from omnara.log import get_logger
from omnara.machines.frames import (
    ActionAccept,
    ActionAcceptAck,
    FromDaemon,
    FromServer,
    Heartbeat,
    HeartbeatAck,
    ProcessAccept,
    ProcessAcceptAck,
    ProcessTerminate,
    Report,
    ReportAck,
    RuntimeEnded,
    SkillReport,
    UnfitReport,
    Unknown,
)
from omnara.machines.link import Link, LinkClosed

__all__ = ["Session"]

log = get_logger(__name__)

NORMAL: Final = 1000
TRY_AGAIN: Final = 1011


class _Over(Exception):
    """The channel is to be closed; with a `code` the runtime is told that it has ended, and why."""

    def __init__(self, code: str = "", close: int = NORMAL) -> None:
        super().__init__(code)
        self.code = code
        self.close = close


class Session:
    """One channel. `run` returns when it is over, however it ended; `wake` and `close` may be called at any time.

    `turns` bounds how many channels of the process use the database at once: they wait here for as long as it takes,
    and not in the pool, whose patience is that of a request. `strays`: what the process's channels refused.

    `silence_s`: how long the other side may say nothing. `coarse_s`: not None for a machine that this process drives;
    its beats only show that its tasks are alive, and whoever drives it extends the leases of all its machines at once.
    """

    def __init__(
        self,
        deps: Deps,
        link: Link[FromServer, FromDaemon],
        channel: Channel,
        turns: asyncio.Semaphore,
        strays: Strays,
        *,
        silence_s: float | None = None,
        coarse_s: float | None = None,
    ) -> None:
        self.channel = channel
        self._deps = deps
        self._link = link
        self._turns = turns
        self._strays = strays
        self._silence_s = silence_s
        self._coarse_s = coarse_s
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._sent = Outstanding(again_s=deps.settings.machine_heartbeat_s)

    def wake(self) -> None:
        """Look for work: something may have been queued, or taken away."""
        self._wanted.set()

    async def close(self, code: int = NORMAL) -> None:
        """Close the channel; `run` returns soon after."""
        await self._link.close(code)

    async def run(self) -> None:
        """Serve the channel until it is closed by either side or is no longer the machine's.

        Raises nothing but CancelledError: what goes wrong closes this channel, and the machine connects again.
        """
        parts = (asyncio.ensure_future(self._read()), asyncio.ensure_future(self._drain()))
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            ends = await asyncio.gather(*parts, return_exceptions=True)
        await self._end([end for end in ends if isinstance(end, Exception)])

    async def _end(self, ends: list[Exception]) -> None:
        code = NORMAL
        for end in ends:
            if isinstance(end, _Over):
                code = end.close
                if end.code:
                    await self._tell_end(end.code)
            elif isinstance(end, TimeoutError):
                log.info("a machine said nothing for too long", machine_id=str(self.channel.machine_id))
            elif not isinstance(end, LinkClosed):
                code = TRY_AGAIN
                log.error("a machine's channel failed", exc_info=end, machine_id=str(self.channel.machine_id))
        await self._link.close(code)

    async def _tell_end(self, code: str) -> None:
        try:
            await self._link.send(RuntimeEnded(error_code=code))
        except LinkClosed:
            log.debug("a runtime ended that is gone already", runtime_id=str(self.channel.runtime_id))

    # --- from the machine -------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(self._silence_s):
                frame = await self._link.receive()
            await self._take(frame)

    async def _take(self, frame: FromDaemon) -> None:
        match frame:
            case Heartbeat():
                await self._beat(frame)
            case ProcessAccept():
                await self._accept_process(frame)
            case ActionAccept():
                await self._accept_action(frame)
            case Report():
                await self._report(frame)
            case UnfitReport():
                log.warning("a report that cannot be judged", machine_id=str(self.channel.machine_id))
                await self._link.send(unfit(frame))
            case SkillReport():
                log.debug("a machine reports a skill that nobody offered it", state=frame.state)
            case Unknown():
                await self._link.send(invalid("this type of frame is not understood"))
            case _:
                assert_never(frame)

    async def _beat(self, frame: Heartbeat) -> None:
        """Acknowledge a beat, and say again what is to end."""
        next_ms = round(self._coarse_s * 1000) if self._coarse_s is not None else await self._beaten(frame)
        await self._link.send(HeartbeatAck(next_heartbeat_after_ms=next_ms))
        self._sent.terminations.clear()
        self.wake()

    async def _beaten(self, frame: Heartbeat) -> int:
        """Extend the lease; return the milliseconds until the next beat, also while the database is away.

        A machine whose beats are not acknowledged would take this server for dead.
        """
        channel = self.channel
        instance_id = instance_of(frame.daemon_instance_id)
        if instance_id is None:
            await self._link.send(invalid("daemon_instance_id is no UUID"))
            raise _Over
        try:
            async with self._turns:
                beat = await runtimes.beat(
                    self._deps, channel.runtime_id, channel.session_id, instance_id, frame.observed_platform
                )
        except Unavailable as error:
            log.warning("a heartbeat could not be written", error=str(error))
            return max(1, round(self._deps.settings.machine_heartbeat_s * 1000))
        if isinstance(beat, runtimes.RuntimeEnded):
            raise _Over(beat.code)
        return beat

    async def _accept_process(self, frame: ProcessAccept) -> None:
        process_id = await self._known(IdKind.PROCESS, frame.process_id)
        if process_id is None:
            return
        channel = self.channel
        try:
            async with self._turns:
                answer = await accept.accept_process(self._deps, channel.runtime_id, channel.session_id, process_id)
        except Unavailable as error:
            # Whether the grant was written is not known here. The next registration finds out, and starts it if it was.
            log.warning("a grant could not be written; the machine has to connect again", error=str(error))
            raise _Over(close=TRY_AGAIN) from error
        if isinstance(answer, accept.NotAvailable):
            self._sent.refused(process_id, monotonic())
            await self._link.send(unavailable("process_offer_unavailable", frame.process_id))
        else:
            self._sent.accepted(process_id, monotonic())
            await self._link.send(ProcessAcceptAck(process_id=frame.process_id))
        if self._sent.crowded:
            self.wake()

    async def _accept_action(self, frame: ActionAccept) -> None:
        process_id = await self._known(IdKind.PROCESS, frame.process_id)
        action_id = await self._known(IdKind.PROCESS_ACTION, frame.process_action_id)
        if process_id is None or action_id is None:
            return
        channel = self.channel
        try:
            async with self._turns:
                answer = await accept.accept_action(
                    self._deps, channel.runtime_id, channel.session_id, process_id, action_id
                )
        except Unavailable as error:
            log.warning("an action could not be granted; the machine has to connect again", error=str(error))
            raise _Over(close=TRY_AGAIN) from error
        if isinstance(answer, accept.NotAvailable):
            self._sent.refused(action_id, monotonic())
            await self._link.send(unavailable("action_offer_unavailable", frame.process_id, frame.process_action_id))
        else:
            self._sent.accepted(action_id, monotonic())
            await self._link.send(
                ActionAcceptAck(
                    process_id=frame.process_id,
                    process_action_id=frame.process_action_id,
                    process_state=answer.process_state,
                    default_output_cursor=answer.default_output_cursor,
                )
            )
        if self._sent.crowded:
            self.wake()

    async def _report(self, frame: Report) -> None:
        try:
            async with self._turns:
                ack = await reports.apply(self._deps, self.channel.runtime_id, frame)
        except Unavailable as error:
            log.warning("a report could not be written", error=str(error))
            code = "storage_unavailable"
            ack = ReportAck(ack_status="transient_error", report_id=frame.report_id, error_code=code, error="try again")
        ack, told = self._strays.answer(self.channel, frame, ack)
        await self._link.send(ack)
        if told is not None:
            await self._link.send(told)
        self.wake()

    async def _known(self, kind: IdKind, text: str) -> UUID | None:
        """Return the id, or say that it is none, without repeating what cannot be read."""
        try:
            return decode(kind, text)
        except InvalidPublicId:
            await self._link.send(invalid(f"not an id that starts with {kind.value}_"))
            return None

    # --- to the machine ---------------------------------------------------------------------------------

    async def _drain(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if not self._sent.full(monotonic()):
                try:
                    await self._offer()
                except Unavailable as error:
                    log.warning("work for a machine could not be read", error=str(error))  # the sweep asks again

    async def _offer(self) -> None:
        channel, now = self.channel, monotonic()
        async with self._turns:
            found = await offers.pending(self._deps, channel.runtime_id, channel.session_id, self._sent.skip(now))
        if isinstance(found, runtimes.RuntimeEnded):
            raise _Over(found.code)
        if len(found.processes) == OFFERED_PROCESSES or len(found.actions) == OFFERED_ACTIONS:
            self.wake()  # for the rest
        for process in found.processes:
            self._sent.offered(decode(IdKind.PROCESS, process.process_id), now)
            await self._link.send(process)
        for action in found.actions:
            self._sent.offered(decode(IdKind.PROCESS_ACTION, action.process_action_id), now)
            await self._link.send(action)
        for process_id in found.terminations:
            if self._sent.may_terminate(process_id, now):
                await self._link.send(ProcessTerminate(process_id=encode(IdKind.PROCESS, process_id)))
