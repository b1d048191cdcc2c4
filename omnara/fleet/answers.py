"""What a channel answers to frames that ask for nothing that could be done. Source: machines.md §3 (errors), §6."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from omnara.machines.frames import ErrorFrame, ReportAck, UnfitReport

__all__ = ["VALIDATION", "instance_of", "invalid", "unavailable", "unfit"]

VALIDATION: Final = "validation_failed"


def invalid(error: str) -> ErrorFrame:
    """Return an error that concerns no process, so that a machine only notes it."""
    return ErrorFrame(error_code=VALIDATION, error=error)


def unavailable(code: str, process_id: str, action_id: str = "") -> ErrorFrame:
    """Return the refusal of a grant."""
    return ErrorFrame(error_code=code, error="no longer available", process_id=process_id, process_action_id=action_id)


def unfit(report: UnfitReport) -> ReportAck:
    """Return the refusal of a report that cannot be judged: cut off for it, a machine would say it again for ever."""
    return ReportAck(
        ack_status="permanent_reject",
        report_id=report.report_id,
        error_code=VALIDATION,
        error="the report's event is none that a machine can report",
    )


def instance_of(text: str) -> UUID | None:
    """Return the UUID of a daemon's process; None for what is none, and for the zero one, which names nothing."""
    try:
        return UUID(text) if UUID(text).int else None
    except ValueError:
        return None
