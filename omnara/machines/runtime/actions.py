"""Actions on processes: reads are served from the home's disk; what has an effect leaves its mark there before it.

Source: machines.md §4 (ordering, effect mark), §6 (reads are not frozen), §7 (payloads, outcomes).
"""

from __future__ import annotations

import asyncio
from typing import Literal, assert_never

import msgspec

from omnara.clock import Deadline
from omnara.machines import wire
from omnara.machines.processes import ActionOutcome, ActionRecord, Home, HomeFull
from omnara.machines.runtime.lives import Lives
from omnara.machines.runtime.outbox import Outbox
from omnara.machines.runtime.output import Seen, seen
from omnara.machines.runtime.reports import action_event
from omnara.machines.runtime.tasks import Tasks

__all__ = ["Action", "Actions"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """An action that was granted. `default_cursor`: where a read without a cursor begins."""

    process_id: str
    action_id: str
    kind: Literal["write", "read", "interrupt", "terminate"]
    seq: int
    payload: msgspec.Raw
    default_cursor: int = 0


class Actions:
    """Performs actions. Effects belong to the runtime: once begun, they go on whatever becomes of the line."""

    def __init__(self, home: Home, outbox: Outbox, lives: Lives, tasks: Tasks) -> None:
        self._home = home
        self._outbox = outbox
        self._lives = lives
        self._tasks = tasks
        self._last: dict[str, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> list[asyncio.Task[None]]:
        """Effects that were begun and whose outcome is not in the outbox yet."""
        return list(self._last.values())

    async def perform(self, action: Action) -> None:
        """Perform an action and put its report into the outbox. Cancelled, a read is given up, an effect is not."""
        if action.process_id not in self._lives.kept:
            # The files are gone, and the process with them; only what runs elsewhere could answer for it.
            self._unknown(action)
        elif action.kind == "read":
            await self._read(action)
        else:
            await asyncio.shield(self.begin(action))

    def _unknown(self, action: Action) -> None:
        self._fail(action, "output_unavailable" if action.kind == "read" else "process_not_running")

    def _fail(self, action: Action, code: str, message: str = "") -> None:
        """Report an action that left no mark in the home; if that report is lost, the server asks again."""
        outcome = ActionOutcome(state="failed", reason_code=code, reason_message=message)
        event = action_event(action.process_id, action.action_id, outcome)
        self._outbox.add(action.process_id, action.action_id, "connection", event)

    def begin(self, action: Action) -> asyncio.Task[None]:
        """Perform an action with an effect in a task of the runtime, after those of the same process before it."""
        process_id = action.process_id
        task = self._tasks.spawn(self._effect(action, self._last.get(process_id)), f"action {action.action_id}")
        self._last[process_id] = task
        task.add_done_callback(lambda done: self._ended(process_id, done))
        return task

    def recall(self, process_id: str, record: ActionRecord) -> None:
        """Report an action of which the home has a mark: its outcome, which is waited for if it is not there yet."""
        if record.outcome is not None:
            event = action_event(process_id, record.action_id, record.outcome)
            self._outbox.add(process_id, record.action_id, "home", event)
            return
        action = Action(
            process_id=process_id,
            action_id=record.action_id,
            kind=record.kind,
            seq=record.seq,
            # The home has the mark, so it tells what became of the action and never performs it.
            payload=msgspec.Raw(b'{"close_stdin":true}'),
        )
        self.begin(action)

    def _ended(self, process_id: str, task: asyncio.Task[None]) -> None:
        if self._last.get(process_id) is task:
            del self._last[process_id]

    async def _effect(self, action: Action, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        try:
            outcome = await self._outcome(action)
        except wire.FrameError as error:
            self._fail(action, "invalid_payload", str(error))
        except HomeFull:
            self._fail(action, wire.STORAGE_EXHAUSTED, wire.STORAGE_EXHAUSTED_MESSAGE)
        except KeyError:
            self._unknown(action)
        else:
            event = action_event(action.process_id, action.action_id, outcome)
            self._outbox.add(action.process_id, action.action_id, "home", event)

    async def _outcome(self, action: Action) -> ActionOutcome:
        match action.kind:
            case "write":
                payload = wire.write_payload(action.payload)
                data, close = payload.data.encode(), payload.close_stdin
                return await self._home.write(action.process_id, action.action_id, action.seq, data, close)
            case "interrupt" | "terminate":
                return await self._home.signal(action.process_id, action.action_id, action.seq, action.kind)
            case "read":
                raise AssertionError("a read has no effect")
            case _:
                assert_never(action.kind)

    async def _read(self, action: Action) -> None:
        try:
            payload = wire.read_payload(action.payload)
            cursor = action.default_cursor if isinstance(payload.cursor, msgspec.UnsetType) else payload.cursor
            found = await self._seen(action.process_id, cursor, payload)
        except wire.FrameError as error:
            self._fail(action, "invalid_payload", str(error))
            return
        except KeyError:
            self._unknown(action)
            return
        event = wire.ActionApplied(
            process_id=action.process_id,
            process_action_id=action.action_id,
            result=wire.ReadObservation(
                process_id=action.process_id,
                output=found.text,
                cursor=found.cursor,
                next_cursor=found.next_cursor,
                truncated=found.truncated,
            ),
        )
        self._outbox.add(action.process_id, action.action_id, "connection", event)

    async def _seen(self, process_id: str, cursor: int, payload: wire.ReadPayload) -> Seen:
        """Read; when nothing whole is there yet, wait for more until the wait is over or the process is."""
        deadline = Deadline(payload.wait_ms / 1000)
        over = False
        while True:
            last_look = over or deadline.passed
            piece = await self._home.read(process_id, cursor, payload.max_bytes)
            found = seen(piece, payload.max_bytes)
            if found.text or piece.closed or found.truncated or last_look:
                return _from(found, cursor)
            record = await self._home.watch(process_id, piece.end, deadline.remaining_s)
            over = record.exit is not None


def _from(found: Seen, cursor: int) -> Seen:
    """A read beyond the end saw nothing, at its own cursor: output that comes later is not skipped and not repeated."""
    if found.cursor >= cursor or found.text:
        return found
    return Seen("", cursor, cursor, found.truncated)
