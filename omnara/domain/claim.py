"""A claim: one worker's right to run one agent's steps, with the hot row's facts as of the claim.

The worker updates its copy from the answer of every `advance`, so that a kept claim needs no further read.
Source: DESIGN §3 "Three verbs".
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec

from omnara.domain.advance import Advanced
from omnara.domain.step import WaitingInput


class Claim(msgspec.Struct):
    """Mutable: it follows the hot row. `void` is a list of half-open ranges of sequences that the fold skips.

    `waited_s` is how long the agent had been ready before this claim; `retry_in_s` how long a parked retry still has.
    `head_id` is the last event of the log and `waiting` all inputs that wait, as of `inputs_gen`; None: read them.
    """

    agent_id: UUID
    project_id: UUID
    claim_token: int
    epoch: int
    waited_s: float
    next_sequence: int
    inputs_gen: int
    turn_id: UUID | None
    turn_sequence: int
    turn_open: bool
    batch_sequence: int | None
    open_calls: int
    attempt: int
    step_number: int
    deaths: int
    history_version: int
    void: tuple[tuple[int, int], ...]
    config_id: UUID
    retry_in_s: float | None
    ready_at: Any = None
    head_id: UUID | None = None
    waiting: tuple[WaitingInput, ...] | None = None
    steps_done: int = 0

    def follow(self, done: Advanced) -> None:
        """Take over what the hot row says after a save of this claim.

        Not `inputs_gen`: it stands for what was read under this claim. A save that kept the claim without beginning a
        step may have met a newer one, and taking that over would hide whatever moved it. Source: coordination §7.
        """
        self.next_sequence = done.next_sequence
        self.turn_id = done.turn_id
        self.turn_sequence = done.turn_sequence
        self.step_number = done.step_number
        self.batch_sequence = done.batch_sequence


class HeldClaim(msgspec.Struct, frozen=True):
    """What the database says about one claim of this worker, for reconciling."""

    agent_id: UUID
    claim_token: int
    epoch: int
    step_number: int
    inputs_gen: int
    next_sequence: int


class ClaimState(msgspec.Struct, frozen=True):
    """The hot row and the evidence that tells what became of a save whose outcome is unknown.

    `frontier` is that of the newest step.
    """

    worker_id: UUID | None
    claim_token: int | None
    epoch: int
    next_sequence: int
    inputs_gen: int
    turn_id: UUID | None
    turn_sequence: int
    step_number: int
    batch_sequence: int | None
    ready: bool
    step_state: str | None
    event_sequence: int | None
    read_at: Any
    frontier: int | None = None
