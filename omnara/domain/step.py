"""`decide`: what an agent does next. A pure function; everything else in the engine serves it.

Source: engine.md §3.2 (order of choice) and trap 5 (an incomplete batch blocks everything below it).
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import UUID

import msgspec

MAX_ATTEMPTS = 9
"""One call and eight retries per model operation. Source: DESIGN §5, engine.md §5."""


class WaitingInput(msgspec.Struct, frozen=True):
    """A content input that was received and is not in the log yet. `content` is the stored JSON of its blocks."""

    id: UUID
    delivery_mode: Literal["queued", "steering"]
    rank: int
    content: str
    actor_id: UUID | None
    idempotency_key: str | None


class OpenCall(msgspec.Struct, frozen=True):
    """A tool call of the open batch that has no result yet."""

    id: UUID
    ordinal: int
    name: str
    type: Literal["built_in", "custom", "mcp"]
    input: dict[str, Any]
    state: str

    @property
    def runnable(self) -> bool:
        """True when the engine itself has to run it now: custom calls are answered from outside."""
        return self.state == "ready" and self.type != "custom"


class Situation(msgspec.Struct, frozen=True):
    """Everything that a decision depends on, as read under one claim. `retry_in_s` is None when nothing is parked."""

    turn_open: bool
    calls: tuple[OpenCall, ...] = ()
    steering: tuple[WaitingInput, ...] = ()
    queued: WaitingInput | None = None
    attempt: int = 0
    retry_in_s: float | None = None


class RunTools(msgspec.Struct, frozen=True):
    """Run these calls of the open batch, all at once."""

    calls: tuple[OpenCall, ...]


class CallModel(msgspec.Struct, frozen=True):
    """Admit these inputs (they open one new turn together), then call the model; `attempt` counts from 1."""

    admit: tuple[WaitingInput, ...]
    attempt: int


class Park(msgspec.Struct, frozen=True):
    """Nothing before `retry_in_s` seconds have passed; the slot is given back."""

    retry_in_s: float


class Waiting(msgspec.Struct, frozen=True):
    """Somebody outside owes results or answers; a producer will wake the agent."""


class Idle(msgspec.Struct, frozen=True):
    """The turn is over and no input waits."""


Decision = RunTools | CallModel | Park | Waiting | Idle


def decide(situation: Situation) -> Decision:
    """Choose the next step. Pure: the same situation always gives the same decision."""
    runnable = tuple(call for call in situation.calls if call.runnable)
    if runnable:
        return RunTools(runnable)
    if situation.calls:
        return Waiting()
    if situation.steering:
        return CallModel(situation.steering, attempt=1)
    if situation.turn_open:
        if situation.retry_in_s is not None and situation.retry_in_s > 0:
            return Park(situation.retry_in_s)
        return CallModel((), attempt=situation.attempt + 1)
    if situation.queued is not None:
        return CallModel((situation.queued,), attempt=1)
    return Idle()
