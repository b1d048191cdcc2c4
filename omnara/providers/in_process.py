"""A model that is a Python function in this process.

For benches it takes the network out of the picture without taking any step of the engine out; for an operator it is a
way to script an agent. It needs no rendered history, so an attempt costs what the function costs.
Source: DESIGN §9 (`steps`, in-process model).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from omnara.domain.content import TextBlock
from omnara.domain.stream import (
    BlockStart,
    BlockStop,
    ErrorDelta,
    MessageStop,
    Sink,
    Stop,
    StreamFault,
    TextDelta,
    TextStreamBlock,
    ThinkingDelta,
    ThinkingStreamBlock,
    ToolArgumentsDelta,
    ToolUseStreamBlock,
)
from omnara.providers.protocol import Completed, ModelCall, Outcome, RequestedCall

API_FORMAT: Final = "in_process"

Script = Callable[[ModelCall], Outcome | Awaitable[Outcome]]
"""Decides an answer from the call. It must not block; it may be a coroutine function."""


class InProcessAdapter:
    """Calls a script. Deltas are derived from its answer, one per block, only when somebody listens."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def call(self, call: ModelCall, sink: Sink | None) -> Outcome:
        """See `ModelAdapter.call`. What the script raises propagates."""
        answer = self._script(call)
        if inspect.isawaitable(answer):
            answer = await answer
        if sink is not None:
            _announce(answer, sink)
        return answer

    async def close(self) -> None:
        """Nothing is held."""


def say(text: str) -> Completed:
    """An answer that ends the turn."""
    return Completed("end_turn", (TextBlock(text),))


def ask(call: ModelCall, *requests: tuple[str, dict[str, Any]], text: str = "") -> Completed:
    """An answer that asks for tools, each given as name and input, after `text` if there is any."""
    blocks: list[TextBlock | RequestedCall] = [TextBlock(text)] if text else []
    for name, arguments in requests:
        call_id, public_id = call.new_call_id()
        blocks.append(RequestedCall(call_id, public_id, public_id, name, arguments))
    return Completed("tool_use", tuple(blocks))


def _announce(answer: Outcome, sink: Sink) -> None:
    if not isinstance(answer, Completed):
        sink(ErrorDelta(StreamFault(answer.message)))
        return
    for index, block in enumerate(answer.blocks):
        if isinstance(block, RequestedCall):
            sink(BlockStart(index, ToolUseStreamBlock(block.public_id, block.name)))
            sink(ToolArgumentsDelta(index, msgspec.json.encode(block.input).decode()))
        elif isinstance(block, TextBlock):
            sink(BlockStart(index, TextStreamBlock()))
            sink(TextDelta(index, block.text))
        else:
            sink(BlockStart(index, ThinkingStreamBlock()))
            sink(ThinkingDelta(index, block.text))
        sink(BlockStop(index))
    reason = answer.stop_reason
    sink(MessageStop(Stop("unknown" if reason == "error" else reason, answer.usage)))
