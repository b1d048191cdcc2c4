"""One connection of a runtime: what comes in is handed on, what has to be told goes out, and silence ends it.

Everything that only makes sense while the server is listening belongs to it and ends with it: offers whose grant did
not come, reads, heartbeats. Source: machines.md §3.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, assert_never

import msgspec

from omnara.clock import monotonic
from omnara.log import get_logger
from omnara.machines import wire
from omnara.machines.link import DEPTH, Link, LinkClosed
from omnara.machines.processes import Home
from omnara.machines.runtime.actions import Action, Actions
from omnara.machines.runtime.lives import Lives
from omnara.machines.runtime.outbox import Outbox, Slot
from omnara.machines.runtime.reports import finished_event, lost_event
from omnara.machines.runtime.tasks import Tasks
from omnara.machines.runtime.timing import Timing

__all__ = ["Connection", "Ended"]

log = get_logger(__name__)

_Work = (
    wire.ProcessOffer
    | wire.ProcessAcceptAck
    | wire.ProcessTerminate
    | wire.ActionOffer
    | wire.ActionAcceptAck
    | wire.ReportAck
)
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNAVAILABLE: Final = ("process_offer_unavailable", "action_offer_unavailable")


class Ended(msgspec.Struct, frozen=True):
    """The server ended this runtime. Two codes mean that nothing here may be kept; after any other, register again.

    Source: machines.md §3 (runtime_ended).
    """

    code: str

    @property
    def authority_lost(self) -> bool:
        """True when local processes and state are to be destroyed."""
        return self.code in ("machine_decommissioned", "authorization_revoked")


class Connection:
    """One line, from its first frame to its end. `run` may be called once."""

    def __init__(
        self,
        link: Link[wire.FromDaemon, wire.FromServer],
        home: Home,
        outbox: Outbox,
        lives: Lives,
        actions: Actions,
        timing: Timing,
    ) -> None:
        self._link = link
        self._home = home
        self._outbox = outbox
        self._lives = lives
        self._actions = actions
        self._timing = timing
        self._tasks = Tasks()
        self._out: asyncio.Queue[wire.FromDaemon] = asyncio.Queue(DEPTH)
        self._settled: asyncio.Queue[Slot] = asyncio.Queue()
        self._offered: dict[str, wire.ActionOffer] = {}
        self._jobs: dict[str, deque[Action]] = {}
        self._beat_s = 0.0
        self._heard = monotonic()

    @property
    def busy(self) -> bool:
        """True while something that came by this line is under way."""
        return bool(self._offered or self._jobs or not self._out.empty())

    async def run(self, heartbeat: wire.Heartbeat, first_beat_ms: int, lost: Coroutine[Any, Any, None]) -> Ended:
        """Serve until the server ends this runtime. Raises LinkClosed, HomeLost, and whatever `lost` raises.

        Afterwards, also when cancelled, no task of this connection runs and the line is closed.
        """
        self._beat_s = first_beat_ms / 1000
        reading = asyncio.ensure_future(self._read())
        parts = [self._beat(heartbeat), self._silence(), self._send(), self._report(), self._settle()]
        watching: list[asyncio.Future[Any]] = [reading, asyncio.ensure_future(lost)]
        watching += [asyncio.ensure_future(part) for part in (*parts, self._tasks.watch())]
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() or reading.exception() is not None:
                for part in watching:
                    if part.done():
                        part.result()
            # What the server said last counts for more than that the line broke in the same moment.
            return reading.result()
        finally:
            for part in watching:
                part.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await self._tasks.close()
            await self._link.close(1000)

    # --- going out ------------------------------------------------------------------------------------------

    def _put(self, frame: wire.FromDaemon) -> None:
        try:
            self._out.put_nowait(frame)
        except asyncio.QueueFull:
            raise LinkClosed(1008, "the server does not take what it asked for") from None

    async def _send(self) -> None:
        while True:
            await self._link.send(await self._out.get())

    async def _beat(self, heartbeat: wire.Heartbeat) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            await self._out.put(heartbeat)

    async def _silence(self) -> None:
        """End with a server that says nothing, and with one that beats and answers no report."""
        while True:
            quiet_s = max(monotonic() - self._heard, self._outbox.unanswered_s)
            if quiet_s >= self._timing.silence_s:
                raise LinkClosed(1001, "the server does not answer")
            await asyncio.sleep(self._timing.silence_s - quiet_s)

    async def _report(self) -> None:
        while True:
            slot = await self._outbox.next()
            event = slot.event
            if event is None:
                event = await self._end(slot)
            await self._out.put(wire.Report(report_id=slot.report_id, event=event))

    async def _end(self, slot: Slot) -> wire.Event:
        try:
            ended = slot.ended or (await self._home.watch(slot.process_id, 0, 0)).exit
            if ended is None:
                raise LinkClosed(1011, "a process that was over runs again")
            return await finished_event(self._home, slot.process_id, ended)
        except KeyError:
            return lost_event(slot.process_id)

    async def _settle(self) -> None:
        """Keep acknowledgements, one after the other; a report is forgotten only when its acknowledgement is kept."""
        while True:
            slot = await self._settled.get()
            if slot.scope == "home":
                await self._lives.acknowledge(slot.process_id, slot.name)
            self._outbox.settled(slot)
            if slot.name == "exit":
                self._lives.settled(slot.process_id)

    # --- coming in ------------------------------------------------------------------------------------------

    async def _read(self) -> Ended:
        while True:
            frame = await self._link.receive()
            self._heard = monotonic()
            ended = self._take(frame)
            if ended is not None:
                return ended

    def _take(self, frame: wire.FromServer) -> Ended | None:
        """Act on one frame without waiting: whatever takes time is a task."""
        match frame:
            case wire.HeartbeatAck():
                self._beat_s = frame.next_heartbeat_after_ms / 1000
            case wire.RuntimeEnded():
                return Ended(frame.error_code)
            case wire.ErrorFrame():
                self._error(frame)
            case wire.SkillOffer():
                self._put(_no_skills(frame))
            case wire.Unknown():
                log.debug("a frame of an unknown type", type=frame.type)
            case _:
                self._take_work(frame)
        return None

    def _take_work(self, frame: _Work) -> None:
        match frame:
            case wire.ProcessOffer():
                if self._lives.kept.doubt(frame.process_id):
                    raise LinkClosed(1000, "an offer of a process that is over here; the registration will settle it")
                self._tasks.spawn(self._prepare(frame), f"prepare {frame.process_id}")
            case wire.ProcessAcceptAck():
                if not self._lives.grant(frame.process_id):
                    raise LinkClosed(1000, "a grant for a process that is not here; the registration will settle it")
            case wire.ProcessTerminate():
                self._lives.terminate(frame.process_id)
            case wire.ActionOffer():
                self._offer(frame)
            case wire.ActionAcceptAck():
                self._granted(frame)
            case wire.ReportAck():
                self._acknowledged(frame)
            case _:
                assert_never(frame)

    async def _prepare(self, offer: wire.ProcessOffer) -> None:
        _check_ids(offer.process_id)
        if await self._lives.prepare(offer):
            self._put(wire.ProcessAccept(process_id=offer.process_id))

    def _offer(self, offer: wire.ActionOffer) -> None:
        _check_ids(offer.process_id, offer.process_action_id)
        if offer.process_action_id in self._offered or self._outbox.find(offer.process_id, offer.process_action_id):
            return
        self._offered[offer.process_action_id] = offer
        self._put(wire.ActionAccept(process_id=offer.process_id, process_action_id=offer.process_action_id))

    def _granted(self, grant: wire.ActionAcceptAck) -> None:
        offer = self._offered.pop(grant.process_action_id, None)
        if offer is None or offer.process_id != grant.process_id:
            raise LinkClosed(1000, "a grant for an action that was not offered; the registration will settle it")
        action = Action(
            process_id=offer.process_id,
            action_id=offer.process_action_id,
            kind=offer.action_kind,
            seq=offer.seq,
            payload=offer.payload,
            default_cursor=grant.default_output_cursor,
        )
        jobs = self._jobs.setdefault(offer.process_id, deque())
        jobs.append(action)
        if len(jobs) == 1:
            self._tasks.spawn(self._work(offer.process_id), f"actions of {offer.process_id}")

    async def _work(self, process_id: str) -> None:
        """Perform the actions of one process in the order of their grants, one at a time."""
        jobs = self._jobs[process_id]
        while jobs:
            await self._actions.perform(jobs[0])
            jobs.popleft()
        del self._jobs[process_id]

    def _acknowledged(self, ack: wire.ReportAck) -> None:
        if ack.ack_status == "permanent_reject":
            log.error("the server rejects a report", error_code=ack.error_code, report_id=ack.report_id)
        slot = self._outbox.answered(ack)
        if slot is not None:
            self._settled.put_nowait(slot)

    def _error(self, frame: wire.ErrorFrame) -> None:
        if not frame.process_id:
            log.warning("the server could not do something", error_code=frame.error_code, error=frame.error[:500])
        elif frame.error_code not in _UNAVAILABLE:
            raise LinkClosed(1000, f"{frame.error_code}: the registration will settle it")
        elif frame.error_code == "action_offer_unavailable" or frame.process_action_id:
            self._offered.pop(frame.process_action_id, None)
        else:
            self._tasks.spawn(self._lives.close_preparation(frame.process_id), f"close {frame.process_id}")


def _check_ids(*ids: str) -> None:
    """Ids become names of files, and an action's id stands beside the two other slots of its process."""
    if any(_ID.fullmatch(one) is None or one in ("started", "exit") for one in ids):
        raise LinkClosed(1002, "an id that no machine can keep")


def _no_skills(offer: wire.SkillOffer) -> wire.SkillReport:
    return wire.SkillReport(
        request_id=offer.request_id,
        skill_id=offer.skill_id,
        state="failed",
        error_code="not_supported",
        error="this machine's runtime installs no skills",
    )
