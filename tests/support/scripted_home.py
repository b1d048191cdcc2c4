"""A home of processes under a test's hand: what runs, prints and ends is said by the test, and everything is counted.

The object is the durable part: a second runtime over the same object finds what a killed one left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

import msgspec

from omnara.machines.processes import (
    ActionOutcome,
    ActionRecord,
    ExitRecord,
    HomeFull,
    HomeLost,
    OutputSlice,
    ProcessRecord,
    ProcessSpec,
    StartFailed,
)

STARTED_AT = "2026-08-01T10:00:00.000001Z"
ENDED_AT = "2026-08-01T10:00:05.000001Z"


class ScriptedProcess:
    """One process: `record` is what is durable; `executions` and `effects` count what really happened."""

    def __init__(self, spec: ProcessSpec, record: ProcessRecord) -> None:
        self.spec = spec
        self.record = record
        self.executions = 0
        self.effects: list[tuple[str, bytes]] = []
        self.output = b""
        self.dropped = 0


class ScriptedHome:
    """Implements `Home`. `gone`: cannot be reached; `full`: no room; `refuses`: why nothing starts."""

    def __init__(self) -> None:
        self.all: dict[str, ScriptedProcess] = {}
        self.gone = False
        self.full = False
        self.refuses: str | None = None
        self.hold_effects: asyncio.Event | None = None
        self.effect_s = 0.0
        self.executed: Counter[str] = Counter()
        """Executions by process, also of those that were forgotten since."""
        self.acknowledged: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.stopped: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self._launches = 0

    # --- the test's hand --------------------------------------------------------------------------------

    def prints(self, process_id: str, data: bytes) -> None:
        """The process writes `data`."""
        one = self.all[process_id]
        one.output += data
        self._update(one, output_end=len(one.output))

    def drops(self, process_id: str, before: int) -> None:
        """Everything before this offset is no longer kept."""
        self.all[process_id].dropped = before
        self._update(self.all[process_id], output_start=before)

    def ends(self, process_id: str, code: int = 0, **fields: object) -> None:
        """The process exits with `code`; `fields` override its exit record."""
        record = ExitRecord(
            state="exited" if code == 0 else "failed",
            reason_code="" if code == 0 else "nonzero_exit",
            exit_code=code,
            started_at=STARTED_AT,
            ended_at=ENDED_AT,
        )
        self._end(self.all[process_id], msgspec.structs.replace(record, **fields))

    def loses_keeper(self, process_id: str) -> None:
        """What watches over the process is killed."""
        self._update(self.all[process_id], supervisor_live=False)

    def _end(self, one: ScriptedProcess, record: ExitRecord) -> None:
        if one.record.exit is None:
            self._update(one, exit=record, phase="terminal", supervisor_live=False)

    def _update(self, one: ScriptedProcess, **fields: object) -> None:
        one.record = msgspec.structs.replace(one.record, **fields)
        self._changed.set()
        self._changed = asyncio.Event()

    def _reach(self) -> None:
        if self.gone:
            raise HomeLost("away")

    # --- Home -------------------------------------------------------------------------------------------

    async def processes(self) -> list[ProcessRecord]:
        self._reach()
        return [one.record for one in self.all.values()]

    async def prepare(self, spec: ProcessSpec) -> ProcessRecord:
        self._reach()
        if self.full:
            raise HomeFull
        if self.refuses is not None:
            raise StartFailed(self.refuses)
        if spec.process_id not in self.all:
            self._launches += 1
            record = ProcessRecord(
                process_id=spec.process_id,
                supervisor_id=f"launch-{self._launches}",
                phase="prepared",
                supervisor_live=False,
                execution_committed=False,
            )
            self.all[spec.process_id] = ScriptedProcess(spec, record)
        return self.all[spec.process_id].record

    async def execute(self, process_id: str, wait_s: float) -> ProcessRecord:
        self._reach()
        if self.full:
            raise HomeFull
        one = self.all[process_id]
        if not one.record.execution_committed:
            one.executions += 1
            self.executed[process_id] += 1
            self._update(one, execution_committed=True, supervisor_live=True, phase="accepted", started_at=STARTED_AT)
        return await self.watch(process_id, 0, wait_s)

    async def watch(self, process_id: str, known_end: int, wait_s: float) -> ProcessRecord:
        one = self.all[process_id]
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            self._reach()
            over = one.record.exit is not None or one.record.output_end > known_end
            if over or not one.record.supervisor_live or loop.time() >= until:
                return one.record
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def read(self, process_id: str, cursor: int, max_bytes: int) -> OutputSlice:
        self._reach()
        one = self.all[process_id]
        start = min(max(cursor, one.dropped), len(one.output))
        data = one.output[start : start + max_bytes]
        return OutputSlice(
            data=data,
            cursor=start,
            next_cursor=start + len(data),
            end=len(one.output),
            dropped=cursor < one.dropped,
            closed=one.record.exit is not None,
        )

    async def write(self, process_id: str, action_id: str, seq: int, data: bytes, close: bool) -> ActionOutcome:
        return await self._effect(process_id, action_id, seq, "write", data)

    async def signal(
        self, process_id: str, action_id: str, seq: int, kind: Literal["interrupt", "terminate"]
    ) -> ActionOutcome:
        outcome = await self._effect(process_id, action_id, seq, kind, b"")
        if kind == "terminate":
            killed = ExitRecord(
                state="killed", reason_code="terminate_requested", started_at=STARTED_AT, ended_at=ENDED_AT
            )
            self._end(self.all[process_id], killed)
        return outcome

    async def _effect(
        self, process_id: str, action_id: str, seq: int, kind: Literal["write", "interrupt", "terminate"], data: bytes
    ) -> ActionOutcome:
        self._reach()
        one = self.all[process_id]
        known = next((action for action in one.record.actions if action.action_id == action_id), None)
        if known is None:
            known = ActionRecord(action_id=action_id, kind=kind, seq=seq)
            self._update(one, actions=[*one.record.actions, known])
            if self.hold_effects is not None:
                await self.hold_effects.wait()
            one.effects.append((kind, data))
            if self.effect_s:
                await asyncio.sleep(self.effect_s)
        elif known.outcome is not None:
            return known.outcome
        outcome = known.outcome or ActionOutcome(state="applied")
        self._action(one, action_id, outcome=outcome)
        return outcome

    def _action(self, one: ScriptedProcess, action_id: str, **fields: object) -> None:
        actions = [
            msgspec.structs.replace(action, **fields) if action.action_id == action_id else action
            for action in one.record.actions
        ]
        self._update(one, actions=actions)

    async def stop(self, process_id: str, reason_code: str) -> None:
        self._reach()
        self.stopped.append((process_id, reason_code))
        self._end(self.all[process_id], ExitRecord(state="unknown", reason_code=reason_code))

    async def acknowledge(self, process_id: str, slot: str) -> None:
        self._reach()
        self.acknowledged.append((process_id, slot))
        one = self.all[process_id]
        if slot == "started":
            self._update(one, started_acknowledged=True)
        elif slot == "exit":
            self._update(one, exit_acknowledged=True)
        else:
            self._action(one, slot, acknowledged=True)

    async def forget(self, process_id: str) -> None:
        self._reach()
        self.forgotten.append(process_id)
        self.all.pop(process_id, None)
