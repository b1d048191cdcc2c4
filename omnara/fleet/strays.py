"""Reports of processes that nobody here knows, so that a machine is rid of them after one registration, and not never.

The first such report makes the machine register: only that stops what may run there. A daemon then reports the
released process again on its next channel, and would be sent to register for ever if it were refused for ever; so what
was said on an earlier channel is acknowledged, for the machine to forget. Source: machines.md §6, §14 row 17.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.db.fleet import Channel
from omnara.engine.machines.reconcile import CONFLICT as CONTRADICTION
from omnara.engine.machines.verdicts import NO_SUCH_PROCESS, contradicts
from omnara.machines.frames import ErrorFrame, Report, ReportAck

__all__ = ["Strays"]

KEPT: Final = 4_096
"""Strays remembered in this process; one that was forgotten costs its machine one more registration."""


class Strays:
    """What was refused on which channel. Another replica does not know of it, and refuses once itself."""

    def __init__(self) -> None:
        self._refused: dict[tuple[UUID, str], UUID] = {}

    def answer(self, channel: Channel, report: Report, ack: ReportAck) -> tuple[ReportAck, ErrorFrame | None]:
        """Return how a report is acknowledged, and the error that makes its machine register, if that could help."""
        if not contradicts(ack):
            return ack, None
        key = (channel.machine_id, report.event.process_id)
        if ack.error == NO_SUCH_PROCESS:
            if self._refused.get(key, channel.session_id) != channel.session_id:
                return msgspec.structs.replace(ack, ack_status="cleanup_only", error_code="", error=""), None
            self._refused[key] = channel.session_id
            if len(self._refused) > KEPT:
                del self._refused[next(iter(self._refused))]
        return ack, ErrorFrame(error_code=CONTRADICTION, error=ack.error, process_id=report.event.process_id)
