"""The engine with agents that end after some hundred events, so that a run of minutes is in a steady state."""

from __future__ import annotations

from typing import Any

from bench.engine import EngineContestant
from bench.workload import FINAL, Work
from omnara.providers.in_process import say
from omnara.providers.protocol import Completed, ModelCall

__all__ = ["EnduringContestant"]


class _Ending(Work):
    """The bench's model, which ends a conversation once it has so many events."""

    def __init__(self, events: int, *args: Any) -> None:
        super().__init__(*args)
        self._events = events

    def model(self, call: ModelCall) -> Completed:
        """Answer a model call."""
        return say(FINAL) if call.context.sequence >= self._events else super().model(call)


class EnduringContestant(EngineContestant):
    """`open` lets all agents run, without an end; `saved` is the number of steps so far."""

    def make_work(self, spec: dict[str, Any]) -> Work:
        """The model that ends conversations after `events`."""
        return _Ending(int(spec["events"]), self._gate, self._ledger)

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """See the class."""
        if what == "open":
            self._gate.open()
            return {}
        if what == "saved":
            return {"saved": self._saved()}
        return await super().ask(what, values)
