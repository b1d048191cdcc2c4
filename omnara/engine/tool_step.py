"""The tools step: one pass over the runnable calls of one output. Their start is committed before any of them runs.

Calls run at the same time. Results are saved as they come: a slow call never holds back a finished one, whose effect
would otherwise have to be reported as unknown if the process died meanwhile.
Source: engine.md §4, §7; DESIGN §2 (invariants 4 and 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import UUID

import msgspec

from omnara.domain.advance import Advance, CloseStep, MovedCall, NewEvent
from omnara.domain.claim import Claim
from omnara.domain.events import ToolResultPayload, encode_payload
from omnara.engine.authorize import result_blocks
from omnara.engine.model_step import Next, advance_for
from omnara.ids import IdKind, encode, new_uuid
from omnara.log import get_logger
from omnara.tools.protocol import Effect, ToolCallRequest, ToolContext, ToolResult, failed
from omnara.tools.registry import BUILT_IN, execute

log = get_logger(__name__)

TOOL_FAULT = "tool_fault"
"""Code of a call that failed by a fault of ours; the log has the traceback."""


class RunningCall(msgspec.Struct, frozen=True):
    """A call that is marked running in the database; a transactional one is ready there until it is settled."""

    id: UUID
    name: str
    input: dict[str, Any]

    @property
    def is_transactional(self) -> bool:
        """Whether `engine.tool_tx` settles it."""
        tool = BUILT_IN.get(self.name)
        return tool is not None and tool.effect is Effect.TRANSACTIONAL


class ToolsBegun(msgspec.Struct, frozen=True):
    """A tools step that is open in the database."""

    turn_id: UUID
    turn_sequence: int
    step_number: int
    calls: tuple[RunningCall, ...]


class Finished(msgspec.Struct, frozen=True):
    """One call that is over."""

    call: RunningCall
    result: ToolResult


async def run_calls(
    agent_id: UUID, calls: Sequence[RunningCall], context: ToolContext
) -> AsyncGenerator[list[Finished], None]:
    """Run calls at once and yield those that are over, in groups as they end.

    Cancelling the consumer cancels the calls that still run; `aclose` waits for them.
    """
    tasks = {asyncio.create_task(_run_one(agent_id, call, context)): call for call in calls}
    pending: set[asyncio.Task[ToolResult]] = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            yield [Finished(tasks[task], task.result()) for task in tasks if task in done]
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _run_one(agent_id: UUID, call: RunningCall, context: ToolContext) -> ToolResult:
    try:
        result = await execute(ToolCallRequest(call.id, agent_id, call.name, call.input), context)
        if context.files is None:
            return result
        blocks = await context.files.spill(agent_id, call.name, result.content_blocks)
        return msgspec.structs.replace(result, content_blocks=tuple(blocks))
    except Exception:  # a fault of one tool fails its call, never the agent
        log.exception("tool_fault", tool=call.name)
        return failed(f"The tool {call.name} failed by an internal fault.", TOOL_FAULT)


def save_results(claim: Claim, begun: ToolsBegun, finished: Sequence[Finished], following: Next | None) -> Advance:
    """The statement's values for results. With `following` the step is closed; without it goes on for the others."""
    events = tuple(
        NewEvent(
            id=new_uuid(),
            kind="tool_result",
            turn_id=begun.turn_id,
            turn_sequence=begun.turn_sequence,
            payload=encode_payload(
                ToolResultPayload(
                    encode(IdKind.TOOL_CALL, entry.call.id), entry.result.outcome, result_blocks(entry.result)
                )
            ),
        )
        for entry in finished
    )
    moved = tuple(
        MovedCall(entry.call.id, "running", "completed", entry.result.outcome, position)
        for position, entry in enumerate(finished)
    )
    item = advance_for(claim, following or Next("continue"), hold=following is None)
    close = CloseStep(begun.step_number, "succeeded", following.action) if following is not None else None
    return msgspec.structs.replace(item, close=close, events=events, moved=moved, answered=len(finished))


def mark_running(item: Advance, calls: Sequence[RunningCall]) -> Advance:
    """Add to an `Advance` that begins a tools step: these ready calls become running, if the step begins.

    Not the transactional ones, which may begin again.
    """
    marked = (MovedCall(call.id, "ready", "running") for call in calls if not call.is_transactional)
    return msgspec.structs.replace(item, moved=(*item.moved, *marked))
