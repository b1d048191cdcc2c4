"""The blow itself: wait for the drawn point, kill the whole process group, start a second process, take the time."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from omnara.cli.demo.command_blow import NotingScript, reach_command, until_over
from omnara.cli.demo.folder import Folder
from omnara.cli.demo.hands import Hands
from omnara.cli.demo.page import Page
from omnara.cli.demo.plan import CommandPlan, KillPlan
from omnara.cli.demo.server import ServerFailed, ServerProcess
from omnara.cli.demo.show import Show
from omnara.cli.demo.verdict import Blow
from omnara.cli.demo.workplace import Workplace
from omnara.clock import monotonic
from omnara.testing.faults import Match
from omnara.testing.request_log import RequestLog
from omnara.testing.server import ModelServer

__all__ = ["Site", "Stage", "Striker"]

WAIT_S: Final = 300.0


class Site(msgspec.Struct, frozen=True):
    """A machine on which the agent runs commands, and the script that asks for them."""

    place: Workplace
    script: NotingScript


class Stage(msgspec.Struct, frozen=True):
    """Who takes part. `model` is None when a real provider answers, `site` when no commands are run."""

    folder: Folder
    page: Page
    model: ModelServer | None
    server: ServerProcess
    show: Show
    site: Site | None = None


class Striker:
    """Kills once, at the planned point, and sees to the second process."""

    def __init__(self, plan: KillPlan | CommandPlan, stage: Stage, hands: Hands) -> None:
        self._plan = plan
        self._stage = stage
        self._hands = hands
        self._struck = False

    def too_late(self) -> None:
        """Call when the agent is done. Raises ServerFailed if the blow cannot fall any more: nothing was shown then."""
        model = self._stage.model
        # The last answer may be saved and shown in the milliseconds that its kill was planned for.
        plan = self._plan
        due = False
        if isinstance(plan, KillPlan) and plan.point == "during_save" and model is not None:
            due = any(_answered(model.log, plan.turn))
        if not self._struck and not due:
            raise ServerFailed("the agent was done before the planned kill; try another --seed")

    async def strike(self) -> Blow:
        """Wait for the point, kill, start again; return what was seen once the next step has started.

        Times count from the kill; when a command is to end by itself meanwhile, from then.
        """
        await self._reach_the_point()
        self._struck = True
        killed = monotonic()
        self._stage.server.kill()
        events = {event.sequence: event.id for event in self._hands.events}
        outputs = self._hands.outputs
        requests = self._stage.model.log.counts.requests if self._stage.model is not None else 0
        self._stage.page.release()
        if self._stage.model is not None:
            self._stage.model.gates.clear()
        self._stage.show.say(f"kill -9 of the server's process group, {self._plan.description}", "bold red")
        if isinstance(self._plan, CommandPlan) and self._stage.site is not None:
            await until_over(self._plan, self._stage.site.place)
            killed = monotonic()
        async with asyncio.TaskGroup() as group:
            going_on = group.create_task(self._next_step(len(events), requests))
            await self._stage.server.start()
            restart_s = monotonic() - killed
            self._stage.show.say(f"second process ready, pid {self._stage.server.pid}", "bold")
        return Blow(events, outputs, requests, going_on.result() - killed, restart_s)

    async def _reach_the_point(self) -> None:
        plan, stage = self._plan, self._stage
        if isinstance(plan, KillPlan):
            await self._reach_turn(plan)
        elif stage.model is not None and stage.site is not None:
            await reach_command(plan, stage.site.script, stage.model, stage.site.place)

    async def _reach_turn(self, plan: KillPlan) -> None:
        if plan.point == "tool_started":
            async with asyncio.timeout(WAIT_S):
                await self._stage.page.requested.wait()
        elif self._stage.model is None:
            await self._reach_with_real_model(plan)
        elif plan.point == "mid_stream":
            gate = self._stage.model.gate(at="mid_text", match=Match(turn=plan.turn))
            await gate.reached(WAIT_S)
        else:
            await self._reach_save(plan, self._stage.model)

    async def _reach_save(self, plan: KillPlan, model: ModelServer) -> None:
        """Return when the answer has left in full and the delay, too short for a timer, has passed."""
        turn = plan.turn
        await model.log.until(lambda log: any(_answered(log, turn)), WAIT_S)
        end = time.perf_counter() + plan.delay_ms / 1000
        while time.perf_counter() < end:
            pass

    async def _reach_with_real_model(self, plan: KillPlan) -> None:
        """The points that the client can see: deltas of an answer, or the answer that has just been saved."""
        async with asyncio.timeout(WAIT_S):
            outputs = max(1, plan.turn // 4)
            await self._hands.until(lambda hands: hands.outputs >= outputs)
            if plan.point == "mid_stream":
                deltas = self._hands.deltas
                await self._hands.until(lambda hands: hands.deltas > deltas)

    async def _next_step(self, events: int, requests: int) -> float:
        """Return when, on the monotonic clock, the agent visibly went on: it asked the model, or its turn was over."""
        model, hands = self._stage.model, self._hands
        if model is None:
            signs = [asyncio.create_task(hands.until(lambda hands: len(hands.events) > events))]
        else:
            signs = [
                asyncio.create_task(model.log.until(lambda log: log.counts.requests > requests, WAIT_S)),
                asyncio.create_task(hands.until(lambda hands: hands.done)),
            ]
        try:
            done, _ = await asyncio.wait(signs, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise ServerFailed(f"the agent did not go on within {WAIT_S:g} s\n{self._stage.server.log_tail()}")
            return monotonic()
        finally:
            for sign in signs:
                sign.cancel()
            await asyncio.gather(*signs, return_exceptions=True)


def _answered(log: RequestLog, turn: int) -> list[bool]:
    return [entry.turn == turn and entry.outcome == "answered" for entry in log.entries]
