"""Answers to reports that are not applied: what is wrong with them, or with who sends them. Source: machines.md §6."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from omnara.db import processes as db
from omnara.db.connection import Connection
from omnara.engine.machines import verdicts
from omnara.engine.machines.verdicts import Reject
from omnara.machines.frames import Report, ReportAck

__all__ = ["INVALID_RUNTIME", "refused", "reject"]

INVALID_RUNTIME: Final = "invalid_runtime"


def reject(report: Report, verdict: Reject) -> ReportAck:
    """Say that a report will never be taken, and why."""
    return ReportAck(
        ack_status="permanent_reject", report_id=report.report_id, error_code=verdict.code, error=verdict.error
    )


async def refused(connection: Connection, runtime_id: UUID, report: Report) -> ReportAck:
    """Say why nothing was found that a report could be about: its runtime is not the machine's, or there is no such."""
    if await db.may_report(connection, runtime_id):
        return reject(report, Reject(verdicts.INVALID, verdicts.NO_SUCH_PROCESS))
    error = "the runtime is not the machine's"
    return ReportAck(ack_status="transient_error", report_id=report.report_id, error_code=INVALID_RUNTIME, error=error)
