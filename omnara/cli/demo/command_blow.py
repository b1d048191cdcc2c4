"""The blow while a command is on its way, runs, or comes to its end; seen in the ledger that commands write."""

from __future__ import annotations

import asyncio
from typing import Final

from omnara.cli.demo.plan import CommandPlan
from omnara.cli.demo.workplace import Workplace
from omnara.testing.answer import Answer, Call
from omnara.testing.audit_commands import CommandAudit, ledger_name
from omnara.testing.conversation import Conversation
from omnara.testing.server import ModelServer

__all__ = ["SLOW_S", "NotingScript", "reach_command", "until_over"]

SLOW_S: Final = 2.5
"""How long the command takes during which the server dies: much longer than it takes to see that it has begun."""
WAIT_S: Final = 300.0
END_S: Final = 60.0
LOOK_S: Final = 0.02


class NotingScript:
    """The audit's script, which notes at which turn it asked for the command that the blow is about."""

    def __init__(self, script: CommandAudit) -> None:
        self._script = script
        self._command = f"echo begin {ledger_name(script.slow)} "
        self.turn: int | None = None

    def __call__(self, conversation: Conversation) -> Answer:
        """Answer as the script does."""
        answer = self._script.answer(conversation)
        if self.turn is None and any(self._asks(block) for block in answer.blocks):
            self.turn = conversation.turn
        return answer

    def _asks(self, block: object) -> bool:
        return isinstance(block, Call) and self._command in str(dict(block.arguments).get("command", ""))


async def reach_command(plan: CommandPlan, script: NotingScript, model: ModelServer, place: Workplace) -> None:
    """Return at the moment at which the server is to be killed. Raises TimeoutError after five minutes."""
    if plan.point == "command_handed_over":
        await model.log.until(
            lambda log: any(entry.turn == script.turn and entry.outcome == "answered" for entry in log.entries), WAIT_S
        )
    else:
        await _until_line(place, f"begin {ledger_name(plan.file)}", WAIT_S)
    await asyncio.sleep(plan.delay_ms / 1000)


async def until_over(plan: CommandPlan, place: Workplace) -> None:
    """Wait, if the plan says so, until the command has ended by itself while no server runs."""
    if plan.point == "command_outlives":
        await _until_line(place, f"end {ledger_name(plan.file)}", END_S)


async def _until_line(place: Workplace, line: str, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if line in await place.ledger():
                return
            await asyncio.sleep(LOOK_S)
