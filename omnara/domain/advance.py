"""What a claim holder wants written in one statement: the values of the `advance` query, one `Advance` per agent.

An `Advance` may close a step, append its events, record tool calls, admit inputs, begin the next step or give the claim
back: all or nothing, and only if the claim is still the caller's. Positions count from 0 within the events of one
`Advance`; sequences are given out by the database.
Source: DESIGN §3 "Three verbs", coordination §2 and §12.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal
from uuid import UUID

import msgspec

StepKind = Literal["model", "tools", "compaction"]
CLEAR_RETRY = -1.0
"""`Advance.retry_s`: forget a parked retry. None keeps it; a number of seconds sets it."""


class NewEvent(msgspec.Struct, frozen=True):
    """One event to append. `turn_sequence` None means the turn that this statement opens."""

    id: UUID
    kind: str
    turn_id: UUID
    turn_sequence: int | None
    payload: str
    is_opening: bool = False
    is_semantic: bool = False
    meta: str | None = None
    replay: bytes | None = None


class NewCall(msgspec.Struct, frozen=True):
    """A tool call of the output being saved. `run`: mark it running if the tools step begins in the same statement."""

    ordinal: int
    id: UUID
    provider_call_id: str
    name: str
    type: str
    input: str
    state: str
    outcome: str | None = None
    result_position: int | None = None
    run: bool = False


class MovedCall(msgspec.Struct, frozen=True):
    """A state change of an existing call; does nothing unless the call is in `from_state`."""

    id: UUID
    from_state: str
    state: str
    outcome: str | None = None
    result_position: int | None = None


class NewInteraction(msgspec.Struct, frozen=True):
    """A permission or question form to open for a call. `request` is the form as JSON text."""

    id: UUID
    tool_call_id: UUID
    kind: Literal["permission", "question"]
    request: str


class CloseStep(msgspec.Struct, frozen=True):
    """The end of the running step. `usage` and `error` are JSON texts."""

    number: int
    state: Literal["succeeded", "failed", "canceled"]
    next_action: str
    usage: str | None = None
    error: str | None = None


class Admission(msgspec.Struct, frozen=True):
    """An input that enters the log when the next step begins."""

    input_id: UUID
    event: NewEvent


class BeginStep(msgspec.Struct, frozen=True):
    """The next step. With admissions it opens a new turn `turn_id`."""

    kind: StepKind
    attempt: int
    config_id: UUID
    turn_id: UUID
    new_turn: bool = False
    call_id: UUID | None = None
    revision_id: UUID | None = None
    secrets: str = ""
    admit: tuple[Admission, ...] = ()


class Advance(msgspec.Struct, frozen=True):
    """One agent's part of the statement. See the module for the meaning.

    `step_number` and `known_next_sequence` are what the claim holder knows of the hot row: with another step or a
    shorter log there, a failover has lost commits, and nothing is written. `seen` is set when a save is sent again: the
    next sequence when it was read that the save had not happened.
    Source: coordination §5 rule 6 (a repeat cannot write twice), §8 (lost commits).
    """

    agent_id: UUID
    claim_token: int
    epoch: int
    gen: int
    turn_id: UUID | None
    turn_sequence: int
    step_number: int
    known_next_sequence: int
    mode: Literal["begin", "release", "hold"]
    close: CloseStep | None = None
    events: tuple[NewEvent, ...] = ()
    calls: tuple[NewCall, ...] = ()
    moved: tuple[MovedCall, ...] = ()
    asked: tuple[NewInteraction, ...] = ()
    begin: BeginStep | None = None
    turn_open: bool | None = None
    output_position: int | None = None
    opened: int | None = None
    answered: int = 0
    attempt: int | None = None
    retry_s: float | None = None
    ready_s: float | None = None
    seen: int | None = None

    @property
    def first_event(self) -> UUID | None:
        """Id of the event at position 0, if there is one: its presence in the log proves that the save happened."""
        if self.events:
            return self.events[0].id
        return self.begin.admit[0].event.id if self.begin is not None and self.begin.admit else None

    @property
    def size(self) -> int:
        """Approximate bytes of the parameters, for the limit of a group."""
        total = 400
        for event in self.events:
            total += 200 + len(event.payload) + (len(event.replay) if event.replay else 0)
        for call in self.calls:
            total += 200 + len(call.input)
        return total


class Advanced(msgspec.Struct, frozen=True):
    """The statement's answer: what the hot row says after the save.

    `begun`: the next step is open and its calls are running. `kept`: the claim is still held (begun, or mode hold).
    `first_sequence`: sequence of the event at position 0. `saved_at`: database clock of the save.
    """

    begun: bool
    kept: bool
    first_sequence: int
    next_sequence: int
    inputs_gen: int
    turn_id: UUID | None
    turn_sequence: int
    step_number: int
    batch_sequence: int | None
    ready: bool
    saved_at: datetime


class ClaimLost(msgspec.Struct, frozen=True):
    """The fence refused: the agent belongs to somebody else, nothing was written."""


AdvanceOutcome = Advanced | ClaimLost
