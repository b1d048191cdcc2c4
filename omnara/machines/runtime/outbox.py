"""The reports that the server has not acknowledged, in order: per process one at a time, over all a bounded number.

Only slots are kept here, not what a report of an end says: its output is read again for each sending, so that a
thousand finished commands cost little memory while the line is down. Source: machines.md §6.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from omnara.clock import monotonic
from omnara.machines import wire
from omnara.machines.processes import ExitRecord

__all__ = ["Outbox", "Slot"]

WINDOW: Final = 32
"""Reports on their way at once: enough to fill a slow line, few enough to fit into its queues with other frames."""

PATIENCE: Final = 3
"""Answers that a report could not be stored until what comes after it is sent all the same."""

Scope = Literal["home", "memory", "connection"]


class Slot:
    """One report of one process: `started`, `exit`, or an action's id.

    `scope`: `home` is derived from the home again after anything; `memory` lives as long as this runtime; `connection`
    ends with the line, because the server then asks again. `event` is the frozen report, None for one made when sent,
    for which `ended` is the exit record if it was seen already: it never changes.
    `since`: when it was sent, or is to be sent again.
    """

    __slots__ = ("ended", "event", "failures", "name", "process_id", "report_id", "scope", "since", "state")

    def __init__(
        self, process_id: str, name: str, scope: Scope, event: wire.Event | None, ended: ExitRecord | None
    ) -> None:
        self.process_id = process_id
        self.name = name
        self.scope = scope
        self.event = event
        self.ended = ended
        self.report_id = ""
        self.state: Literal["waiting", "sent", "parked"] = "waiting"
        self.since = 0.0
        self.failures = 0

    @property
    def holds_up(self) -> bool:
        """Whether later reports of the process wait for this one: not for ever, if the server never takes it."""
        return self.failures < PATIENCE


class Outbox:
    """Slots of all processes. One reader (`next`); everything else may be called from anywhere in the loop."""

    def __init__(self, resend_s: float) -> None:
        self._resend_s = resend_s
        self._slots: dict[str, list[Slot]] = {}
        self._sent: dict[str, Slot] = {}
        self._changed = asyncio.Event()
        self._count = 0

    def __len__(self) -> int:
        return sum(len(slots) for slots in self._slots.values())

    @property
    def pending(self) -> bool:
        """True while a report waits for its acknowledgement; parked ones do not wait."""
        return any(slot.state != "parked" for slots in self._slots.values() for slot in slots)

    def find(self, process_id: str, name: str) -> Slot | None:
        """Return the slot, if it is here."""
        return next((slot for slot in self._slots.get(process_id, ()) if slot.name == name), None)

    def add(
        self,
        process_id: str,
        name: str,
        scope: Scope,
        event: wire.Event | None = None,
        *,
        ended: ExitRecord | None = None,
    ) -> None:
        """Have a report sent. One that is here stays as it is; an end replaces a start that was not sent yet."""
        if self.find(process_id, name) is not None:
            return
        if name == "exit":
            started = self.find(process_id, "started")
            if started is not None and started.state == "waiting" and not started.report_id:
                self._remove(started)
        self._slots.setdefault(process_id, []).append(Slot(process_id, name, scope, event, ended))
        self._changed.set()

    @property
    def unanswered_s(self) -> float:
        """How long the oldest report that was sent has been without an answer."""
        return max((monotonic() - slot.since for slot in self._sent.values()), default=0.0)

    async def next(self) -> Slot:
        """Return the next slot to be sent, marked as sent; waits until there is one and room for it on the way."""
        while True:
            self._changed.clear()
            now = monotonic()
            slot, wait_s = self._eligible(now) if len(self._sent) < WINDOW else (None, None)
            if slot is not None:
                return self._mark_sent(slot)
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # a report is due again

    def _eligible(self, now: float) -> tuple[Slot | None, float | None]:
        """The first slot whose turn it is, else the seconds until one is due again (None: when something changes)."""
        waits: list[float] = []
        for slots in self._slots.values():
            for slot in slots:
                if slot.state == "waiting":
                    if slot.since <= now:
                        return slot, None
                    waits.append(slot.since - now)
                # One at a time for each process, so that a start that has to wait is not overtaken by its end.
                if slot.state != "parked" and slot.holds_up:
                    break
        return None, min(waits, default=None)

    def _mark_sent(self, slot: Slot) -> Slot:
        if not slot.report_id:
            self._count += 1
            slot.report_id = f"r{self._count}"
        slot.state, slot.since = "sent", monotonic()
        self._sent[slot.report_id] = slot
        return slot

    def answered(self, ack: wire.ReportAck) -> Slot | None:
        """Take an acknowledgement: the slot when it is settled (call `settled` once that is durable), else None.

        A transient error has it sent again after a second, a rejection not before the next registration.
        """
        slot = self._sent.get(ack.report_id)
        if slot is None:
            return None
        if ack.ack_status in ("committed", "cleanup_only"):
            return slot
        del self._sent[ack.report_id]
        slot.state = "parked" if ack.ack_status == "permanent_reject" else "waiting"
        slot.since = monotonic() + self._resend_s
        slot.failures += 1
        self._changed.set()
        return None

    def settled(self, slot: Slot) -> None:
        """Forget a slot whose acknowledgement is kept."""
        self._remove(slot)

    def discard(self, process_id: str) -> None:
        """Forget everything of a process."""
        for slot in list(self._slots.get(process_id, ())):
            self._remove(slot)

    def line_lost(self) -> None:
        """Everything that was on its way is to be sent again, and what the server asks for again is dropped."""
        self._sent.clear()
        for slot in [slot for slots in self._slots.values() for slot in slots]:
            if slot.scope == "connection":
                self._remove(slot)
            elif slot.state == "sent":
                slot.state, slot.since = "waiting", 0.0

    def unpark(self) -> None:
        """Send rejected reports again: a registration may have changed what the server thinks of them."""
        for slots in self._slots.values():
            for slot in slots:
                if slot.state == "parked":
                    slot.state, slot.since, slot.failures = "waiting", 0.0, 0
        self._changed.set()

    def _remove(self, slot: Slot) -> None:
        self._sent.pop(slot.report_id, None)
        slots = self._slots.get(slot.process_id, [])
        if slot in slots:
            slots.remove(slot)
        if not slots:
            self._slots.pop(slot.process_id, None)
        self._changed.set()
