"""Applying what machines report: one transaction for each report, and the waiting call has its result when it commits.

A late report never changes a result that was published; what it says is noted, and the machine may forget it.
Order of locks: hot row, process, action, call. Source: machines.md §6; DESIGN §2, invariant 5; engine.md §7.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.db import process_ends as ends
from omnara.db import processes as db
from omnara.db import runtimes
from omnara.db.agents import HotRow
from omnara.db.calls import CallRow
from omnara.db.connection import Connection
from omnara.db.processes import Finish, ReportedAction, ReportedProcess
from omnara.domain.processes import (
    REPLACED,
    action_result,
    command_result,
    failure,
    process_outcome,
)
from omnara.domain.text import clean_text
from omnara.engine.appending import Appending, wake_if_runnable
from omnara.engine.deps import Deps
from omnara.engine.machines import refusals, verdicts
from omnara.engine.machines.completing import Added, Result, Told, add_result, add_results, results_of
from omnara.engine.machines.redact import redacted
from omnara.engine.machines.verdicts import ActionEvent, Apply, ReadPayload, Reject, Repeated, Settled, Verdict
from omnara.ids import IdKind, InvalidPublicId, decode
from omnara.log import get_logger
from omnara.machines.events import Event, ProcessFinished, ProcessStarted, ReadObservation
from omnara.machines.frames import Report, ReportAck

log = get_logger(__name__)

INVALID_READ: Final = "invalid_read_observation"


async def apply(deps: Deps, runtime_id: UUID, report: Report) -> ReportAck:
    """Apply one report of a runtime and return its acknowledgement. Own transaction, announced after its commit.

    Saying the same again changes nothing. Raises Unavailable when Postgres cannot say what became of it: the machine
    sends it again.
    """
    try:
        process_id = decode(IdKind.PROCESS, report.event.process_id)
    except InvalidPublicId:
        return refusals.reject(report, Reject(verdicts.INVALID, "the process id is none"))

    async def work(connection: Connection) -> _Applied:
        if isinstance(report.event, ProcessStarted | ProcessFinished):
            waiting = await db.lock_waiting_report(connection, runtime_id, process_id)
            if waiting is not None:
                return await _Reported(deps, connection, report, *waiting).apply()
        locked = await db.lock_for_report(connection, runtime_id, process_id)
        if locked is None:
            return _Applied(await refusals.refused(connection, runtime_id, report), Told())
        return await _Reported(deps, connection, report, *locked).apply()

    done = await deps.db.run(work)
    done.told.tell(deps)
    if done.quiet_machine is not None:
        async with deps.db.acquire() as connection:
            await runtimes.touch_activity(connection, done.quiet_machine)
    if done.ack.ack_status == "permanent_reject":
        log.warning("report_rejected", process_id=str(process_id), code=done.ack.error_code, error=done.ack.error)
    return done.ack


class _Applied(msgspec.Struct):
    ack: ReportAck
    told: Told
    quiet_machine: UUID | None = None


class _Reported:
    """One report under the locks on its agent, its process and, if it is known, the call that waits for that."""

    def __init__(
        self,
        deps: Deps,
        connection: Connection,
        report: Report,
        hot: HotRow,
        process: ReportedProcess,
        call: CallRow | None = None,
    ) -> None:
        self._deps = deps
        self._connection = connection
        self._report = report
        self._process = process
        self._call = call
        self._appending = Appending(connection, hot)
        self._added: list[Added] = []
        self._ended: Finish | None = None
        self._told = Told()
        self._told_replaced = False

    async def apply(self) -> _Applied:
        event = await self._said(self._report.event)
        if isinstance(event, ProcessStarted):
            ack = await self._started(event)
        elif isinstance(event, ProcessFinished):
            ack = await self._finished(event)
        else:
            ack = await self._action(event)
        changed = ack.ack_status in ("committed", "cleanup_only")
        # Activity on a new place is noted with the first command that told of it.
        noted = self._told_replaced if self._process.replaced else changed and self._process.quiet
        return _Applied(ack, self._told, self._process.machine_id if noted else None)

    async def _said(self, event: Event) -> Event:
        """Return an event whose reason names no secret: a machine's error may quote what it was given."""
        if isinstance(event, ProcessStarted) or not event.state_reason_message:
            return event
        message = await redacted(self._deps, self._connection, self._process.secret_env, event.state_reason_message)
        return msgspec.structs.replace(event, state_reason_message=message)

    # --- processes ----------------------------------------------------------------------------------------

    async def _started(self, event: ProcessStarted) -> ReportAck:
        verdict = verdicts.judge_started(self._process, event)
        if not isinstance(verdict, Apply):
            return await self._judged(verdict, self._process.tool_call_id, None)
        won = False
        cursor = None
        if self._process.purpose == "command":
            assert event.result is not None, "a judged event has its result"
            value = await self._command("running", event.result)
            won = await self._add(self._process.tool_call_id, "succeeded", value)
            cursor = event.result.next_cursor if won else None
        await db.started(self._connection, self._process.id, verdicts.times(event), cursor)
        return await self._done(won, self._process.tool_call_id)

    async def _finished(self, event: ProcessFinished) -> ReportAck:
        verdict = verdicts.judge_finished(self._process, event)
        if not isinstance(verdict, Apply):
            return await self._judged(verdict, self._process.tool_call_id, self._process.closed_at)
        end = verdicts.finish_of(event, None)
        outcome = process_outcome(end.state, end.reason_code)
        won = False
        # The result of a download is more than its command's output: whoever asked for it puts it together.
        if self._process.purpose != "download" or outcome != "succeeded":
            value = await self._command(
                end.state,
                event.result,
                exit_code=end.exit_code,
                reason_code=end.reason_code,
                message=end.reason_message or (f"Ended by signal {end.exit_signal}." if end.exit_signal else ""),
            )
            won = await self._add(self._process.tool_call_id, outcome, value)
        cursor = event.result.next_cursor if won and event.result is not None else None
        end = verdicts.finish_of(event, cursor)
        if won and self._process.next_action_seq == 1:
            self._ended = end  # is written with the result
        else:
            await db.finished(self._connection, self._process.id, end)
            ended = await ends.end_actions_of(self._connection, [self._process.id])
            results = results_of((), ended).get(self._process.agent_id, [])
            self._added += await add_results(self._connection, self._appending, results)
        return await self._done(won, self._process.tool_call_id)

    async def _command(self, state: str, result: Any, **end: Any) -> dict[str, Any]:
        if result is None:
            return command_result(self._process.id, state, **end)
        return command_result(
            self._process.id,
            state,
            output=await redacted(self._deps, self._connection, self._process.secret_env, result.output),
            cursor=result.cursor,
            next_cursor=result.next_cursor,
            truncated=result.truncated,
            **end,
        )

    # --- actions ------------------------------------------------------------------------------------------

    async def _action(self, event: ActionEvent) -> ReportAck:
        try:
            action_id = decode(IdKind.PROCESS_ACTION, event.process_action_id)
        except InvalidPublicId:
            return refusals.reject(self._report, Reject(verdicts.INVALID, "the action id is none"))
        action = await db.lock_action(self._connection, self._process.id, action_id)
        if action is None:
            return refusals.reject(self._report, Reject(verdicts.INVALID, "the process has no such action"))
        verdict = verdicts.judge_action(action, event)
        if not isinstance(verdict, Apply):
            return await self._judged(verdict, action.tool_call_id, action.closed_at)
        if action.kind == "read" and event.result is not None and verdicts.action_state(event) == "applied":
            return await self._read(action, event.result)
        state, reason = verdicts.action_state(event), clean_text(event.state_reason_code)
        reason = reason[: verdicts.MAX_REASON_CHARS]
        await db.action_reported(self._connection, action.id, state, reason, None)
        if state == "applied":
            value = action_result(self._process.id, self._process.state, action.kind)
        else:
            message = clean_text(event.state_reason_message)[: verdicts.MAX_MESSAGE_CHARS]
            value = failure(reason, message=message, process_id=self._process.id, state=self._process.state)
        won = await self._add(action.tool_call_id, "succeeded" if state == "applied" else "failed", value)
        return await self._done(won, action.tool_call_id)

    async def _read(self, action: ReportedAction, seen: ReadObservation) -> ReportAck:
        asked = msgspec.json.decode(action.payload, type=ReadPayload)
        if verdicts.read_fault(self._process, asked, seen):
            await db.action_reported(self._connection, action.id, "failed", INVALID_READ, None)
            value = failure(
                INVALID_READ,
                message="The machine answered a read with what was not asked for.",
                process_id=self._process.id,
                state=self._process.state,
            )
            await self._add(action.tool_call_id, "failed", value)
            await self._done(False, action.tool_call_id)
            return self._ack("cleanup_only")
        row = self._process
        value = await self._command(row.state, seen, exit_code=row.exit_code, reason_code=row.reason_code)
        stored: dict[str, Any] = {"cursor": seen.cursor, "next_cursor": seen.next_cursor, "truncated": seen.truncated}
        if action.tool_call_id is None:
            # Nobody's call: a file on its way. Its bytes must stay as they are, so they are not looked through.
            stored["output"] = clean_text(seen.output)
        else:
            stored["sha256"] = hashlib.sha256(seen.output.encode("utf-8", "replace")).hexdigest()
        await db.action_reported(self._connection, action.id, "applied", "", msgspec.json.encode(stored).decode())
        won = await self._add(action.tool_call_id, "succeeded", value)
        if won and asked.cursor is None:
            await db.set_cursor(self._connection, row.id, seen.next_cursor)
        return await self._done(won, action.tool_call_id)

    # --- the end ------------------------------------------------------------------------------------------

    async def _add(self, call_id: UUID | None, outcome: Any, value: dict[str, Any]) -> bool:
        """Add the result of a call if it waits; whether it did. A command in a new place tells of that, once."""
        if call_id is None:
            return False
        tells = self._process.replaced and call_id == self._process.tool_call_id
        result = Result(call_id, outcome, value | {"notice": REPLACED} if tells else value)
        if self._call is not None and self._call.id == call_id:
            added = [add_result(self._appending, self._call, result)]
        else:
            added = await add_results(self._connection, self._appending, [result])
        self._added += added
        self._told_replaced = tells and bool(added)
        return bool(added)

    async def _done(self, won: bool, call_id: UUID | None) -> ReportAck:
        if self._added:
            await self._write()
            self._told.agents.add(self._process.agent_id)
        return self._ack("committed" if won or call_id is None else "cleanup_only")

    async def _write(self) -> None:
        hot = self._appending.hot
        if len(self._added) > 1:
            await self._appending.write(wake_if_runnable(hot))
            self._told.calls += self._appending.completed
            return
        (one,) = self._added
        wake = wake_if_runnable(hot) == "wake"
        ended = None if self._ended is None else (self._process.id, self._ended)
        await db.publish(self._connection, hot, one.call.id, one.outcome, one.event, wake=wake, ended=ended)
        self._told.calls.append(msgspec.structs.replace(one.call, state="completed", outcome=one.outcome))

    async def _judged(self, verdict: Verdict, call_id: UUID | None, closed_at: datetime | None) -> ReportAck:
        if isinstance(verdict, Reject):
            return refusals.reject(self._report, verdict)
        if isinstance(verdict, Repeated) and await self._published(call_id, closed_at):
            return self._ack("committed")
        assert isinstance(verdict, Repeated | Settled), "what is to be applied was applied"
        return self._ack("cleanup_only")

    async def _published(self, call_id: UUID | None, closed_at: datetime | None) -> bool:
        """Whether a repeated report is the one whose result the call got: it was completed with it, not before."""
        if call_id is None:
            return True
        call = await db.call_of(self._connection, self._process.agent_id, call_id)
        if call is None or call.completed_at is None:
            return False
        return closed_at is None or call.completed_at >= closed_at

    def _ack(self, status: Any) -> ReportAck:
        return ReportAck(ack_status=status, report_id=self._report.report_id)
