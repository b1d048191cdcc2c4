"""What a claimed agent's next decision depends on: as the claim told it, or read in one visit to the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnara.db.connection import Connection
from omnara.db.snapshot import read_for_step, read_open_calls, step_config
from omnara.domain.claim import Claim
from omnara.domain.step import OpenCall, Situation, WaitingInput


def told_situation(claim: Claim) -> tuple[Situation, list[WaitingInput]] | None:
    """Return the situation and the queued inputs that are known if the claim told everything, else None.

    Open calls and failed attempts are not told: what follows from them is read.
    """
    if claim.waiting is None or claim.batch_sequence is not None or claim.attempt:
        return None
    return _situation(claim, (), claim.waiting, 0, claim.retry_in_s)


async def read_situation(
    connection: Connection, claim: Claim, log_from: int
) -> tuple[Situation, list[WaitingInput], list[tuple[Any, ...]]]:
    """Return the situation, the queued inputs that are known (at most two: the second tells that there are more), and
    the rows of the log from sequence `log_from` to the claim's head, which a model step will want next.

    Read after the claim, so it is at least as new as the claim's `inputs_gen`: what came later moves that number, and
    the save that relies on this reading then begins nothing.
    """
    calls: tuple[OpenCall, ...] = ()
    if claim.batch_sequence is not None:
        calls = await read_open_calls(connection, claim.agent_id, claim.batch_sequence)
    # Also while calls are open: this claim may see the end of the batch, and the generation says that inputs were read.
    rows, inputs = await read_for_step(connection, claim.agent_id, log_from, claim.next_sequence - 1)
    attempt, retry_in_s = claim.attempt, claim.retry_in_s
    if attempt and await step_config(connection, claim.agent_id, claim.step_number) != claim.config_id:
        # The config changed while the attempt that failed was under way: another call, which starts afresh.
        attempt, retry_in_s = 0, None
    return (*_situation(claim, calls, inputs, attempt, retry_in_s), rows)


def _situation(
    claim: Claim,
    calls: tuple[OpenCall, ...],
    inputs: Sequence[WaitingInput],
    attempt: int,
    retry_in_s: float | None,
) -> tuple[Situation, list[WaitingInput]]:
    steering = tuple(item for item in inputs if item.delivery_mode == "steering")
    queued = [item for item in inputs if item.delivery_mode == "queued"]
    situation = Situation(claim.turn_open, calls, steering, queued[0] if queued else None, attempt, retry_in_s)
    return situation, queued
