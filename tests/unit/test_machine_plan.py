"""What a registration is answered, as far as that has a size."""

from __future__ import annotations

import msgspec

from omnara.db.process_ends import Ending
from omnara.db.processes import HeldAction, HeldProcess
from omnara.engine.machines.reconcile import NOT_DELIVERED, PAYLOADS_BYTES, plan
from omnara.ids import IdKind, encode, new_uuid
from omnara.machines.registration import MAX_BODY_BYTES, ProcessClaim


def running() -> tuple[ProcessClaim, HeldProcess]:
    process_id = new_uuid()
    claim = ProcessClaim(
        process_id=encode(IdKind.PROCESS, process_id),
        supervisor_instance_id="s",
        phase="accepted",
        supervisor_live=True,
        execution_committed=True,
        action_admission_closed=False,
        resolved_action_seq=0,
        actions=[],
    )
    return claim, HeldProcess(process_id, new_uuid(), None, "tool", "running", granted=True)


def write(process: HeldProcess, size: int) -> HeldAction:
    payload = msgspec.json.encode({"input": "x" * size}).decode()
    return HeldAction(new_uuid(), process.agent_id, process.id, None, 1, "write", payload, "accepted", "")


def test_writes_that_do_not_fit_into_one_answer_were_not_delivered() -> None:
    """Each was accepted, and lost on the way to a machine that came back: as many as fit are said again."""
    claims, held = zip(*(running() for _ in range(20)), strict=True)
    actions = [write(process, 100_000) for process in held]
    small = write(held[0], 10)
    made = plan(claims, held, [*actions[1:], small])
    told = [directive.actions[0].disposition for directive in made.directives]
    fit = PAYLOADS_BYTES // 100_100
    assert told == ["apply"] * (fit + 1) + ["release"] * (19 - fit)
    assert made.actions == [Ending(action.id, "failed", NOT_DELIVERED) for action in actions[fit + 1 :]]
    assert len(msgspec.json.encode(made.directives)) < MAX_BODY_BYTES
    assert all(directive.disposition == "retain" for directive in made.directives)
