"""Agents with logs of a chosen length, grown by the engine itself, and the cost of one more step for each.

The model is a function in this process, but it builds the whole request as for a provider: what a long history costs
to read, fold, encode and copy is in the figures, what it costs to send is not. With no room in the cache for
conversations (`context_cache_bytes` 0) each step reads the whole log.
"""

from __future__ import annotations

import time
from typing import Any, Final
from uuid import UUID

from bench.idle_step import IdleContestant
from bench.workload import TOOL, Work, agent_of
from omnara.domain.content import TextBlock
from omnara.providers.in_process import ask, say
from omnara.providers.openai_chat import OpenAIChat
from omnara.providers.protocol import Completed, ModelCall
from omnara.tools.protocol import ToolCallRequest, ToolContext, ToolResult, succeeded

__all__ = ["LongLogContestant"]

EVENT_BYTES: Final = 100
"""What an event says, without its ids and its JSON. Source: DESIGN §9 (`history`)."""
GROW_LIMIT_S: Final = 600.0
TEXT: Final = "The next record of the list has to be looked at before the work can go on: ".ljust(EVENT_BYTES, ".")
HALF: Final = TEXT[: EVENT_BYTES // 2]
CALLED: Final = {"record": 17, "fields": [HALF[:26]]}
RESULT: Final = succeeded(TextBlock(TEXT[::-1]))


class _Growing(Work):
    """Asks for a tool until the agent's log is long enough, then ends the turn; afterwards ends every turn at once."""

    def __init__(self, targets: dict[str, int], *args: Any) -> None:
        super().__init__(*args)
        self._targets = targets
        self._wire = OpenAIChat()
        self.body_bytes = 0
        self.body_s = 0.0

    def model(self, call: ModelCall) -> Completed:
        """Build the request, as a provider's adapter does, and answer."""
        begun = time.perf_counter()
        self.body_bytes = len(self._wire.body(call))
        self.body_s = time.perf_counter() - begun
        # The answer, its call's result and the last answer follow: they belong to the log's length.
        if call.context.sequence + 3 > self._targets.get(agent_of(call), 0):
            return say(TEXT)
        return ask(call, (TOOL.name, CALLED), text=HALF)

    async def tool(self, call: ToolCallRequest, ctx: ToolContext) -> ToolResult:
        """Answer at once."""
        return RESULT


class LongLogContestant(IdleContestant):
    """`start` with `targets`, the length of each agent's log; `grow` until they have it; `measure` one step of one."""

    def make_work(self, spec: dict[str, Any]) -> Work:
        """The model that grows logs."""
        self._work = _Growing(spec["targets"], self._gate, self._ledger)
        return self._work

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`grow`: wait until all logs are long. `step`: one turn of one agent, timed, with the size of its request."""
        if what == "grow":
            await self.until_idle(GROW_LIMIT_S)
            return {"lengths": [row[0] for row in await self.conn.fetch("select next_sequence - 1 from agent_sched")]}
        if what != "step":
            return await super().ask(what, values)
        await self.until_idle()
        parts = await self.one_step(UUID(values["agent"]), int(values["round"]))
        parts["total"] = parts["overhead"] + parts["model"]
        return {**parts, "body_ms": self._work.body_s * 1000, "body_bytes": self._work.body_bytes}

    def message(self, number: int) -> str:
        """What is said in a round, as long as every other event."""
        return f"Round {number}. ".ljust(EVENT_BYTES, ".")
