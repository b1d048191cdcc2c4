"""The work that every contestant does: a model that asks for one tool call, and a tool that says ok.

So every second step is a tools step. The same texts are used for the engine, the bare loop and the peer: a contest
over different bytes would say nothing.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from omnara.domain.content import TextBlock
from omnara.providers.in_process import ask, say
from omnara.providers.protocol import Completed, ModelCall
from omnara.tools.protocol import Effect, Tool, ToolCallRequest, ToolContext, ToolResult, succeeded

__all__ = ["ARGUMENTS", "FINAL", "TEXT", "TOOL", "Gate", "Ledger", "Work"]

TEXT: Final = "Looking at the next record of the list before going on."
ARGUMENTS: Final[dict[str, Any]] = {"record": 17, "fields": ["name", "amount", "due"]}
RESULT: Final = '{"name": "Orchard Lane 5", "amount": 1250, "due": "2031-04-01"}'
FINAL: Final = "All records have been looked at."

TOOL: Final = Tool(
    name="bench_step",
    description="Looks up one record.",
    input_schema={
        "type": "object",
        "properties": {"record": {"type": "integer"}, "fields": {"type": "array", "items": {"type": "string"}}},
        "required": ["record"],
    },
    type="built_in",
    effect=Effect.OUTSIDE,
)


class Gate:
    """Stops all agents of a process at their next tool call, so that another contestant has the machine to itself."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self.waiting = 0

    @property
    def is_open(self) -> bool:
        """Whether calls pass."""
        return self._open.is_set()

    def open(self) -> None:
        """Let everybody go on."""
        self._open.set()

    def close(self) -> None:
        """Hold whoever comes next."""
        self._open.clear()

    async def passed(self) -> None:
        """Wait until the gate is open."""
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


class Ledger:
    """Counts executions outside of Postgres: one line per effect, appended before it happens.

    Each process has a file of its own, unbuffered, so that a killed process has written all that it did; the parent
    counts the lines of all files.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def hit(self, kind: str, agent: str, number: object) -> None:
        """Note one execution of one step."""
        os.write(self._descriptor, f"{kind} {agent} {number}\n".encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Work:
    """The in-process model and the tool. After `finish` the model says that it is done, and turns end."""

    def __init__(self, gate: Gate, ledger: Ledger | None) -> None:
        self._gate = gate
        self._ledger = ledger
        self._finishing = False
        self._result = succeeded(TextBlock(RESULT))

    def finish(self) -> None:
        """End every turn at its next model call."""
        self._finishing = True
        self._gate.open()

    def model(self, call: ModelCall) -> Completed:
        """Answer a model call: one tool call, with a little text."""
        if self._ledger is not None:
            self._ledger.hit("model", agent_of(call), call.context.sequence)
        if self._finishing:
            return say(FINAL)
        return ask(call, (TOOL.name, ARGUMENTS), text=TEXT)

    async def tool(self, call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
        """Run the tool: nothing but its answer, once the gate is open."""
        if not self._gate.is_open:
            await self._gate.passed()
        if self._ledger is not None:
            self._ledger.hit("tool", str(call.agent_id), call.id)
        return self._result


def opening_text(agent_id: UUID) -> str:
    """What the user says first: it carries the agent's id, by which a model can tell its conversations apart."""
    return f"Go through the list. {agent_id}"


def agent_of(call: ModelCall) -> str:
    """Return the agent's id from the first message of its conversation."""
    messages = call.context.settled or call.context.tail()
    return str(getattr(messages[0], "texts", ("",))[0]).rpartition(" ")[2]
