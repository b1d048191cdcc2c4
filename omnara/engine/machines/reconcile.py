"""What becomes of each process when a machine registers: the two tables, as pure functions.

A machine claims everything that it has anything of; what is stored is compared with that, process by process and action
by action. Nothing that may have begun is ever begun again. A claim that contradicts what is stored (a database that was
set back) is taken out of service: the machine releases it, and its outcome is unknown.
Source: machines.md §5 (both tables), §14 rows 1–5, 10–13 and 17.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal, cast
from uuid import UUID

import msgspec

from omnara.db.process_ends import Ending
from omnara.db.processes import HeldAction, HeldProcess
from omnara.domain.processes import ACTION_OVER, OVER, ActionKind
from omnara.ids import IdKind, InvalidPublicId, decode, encode
from omnara.machines.registration import ActionClaim, ActionDirective, ProcessClaim, ProcessDirective

NOT_STARTED: Final = "execution_not_started"
MISSING: Final = "local_process_missing_after_daemon_reconnect"
CONFLICT: Final = "reconciliation_conflict"
UNRECOVERABLE: Final = "local_action_outcome_unrecoverable"
NOT_DELIVERED: Final = "process_action_not_delivered"
ALREADY_STOPPED: Final = "already_stopped"

PAYLOADS_BYTES: Final = 512 * 1024
"""Of writes that one answer has done: a daemon refuses an answer over a mebibyte, and would register for ever.

Source: machines.md §2 (responses), §7 (131,072 bytes each).
"""

Disposition = Literal["close_preparation", "start", "retain", "release"]


class Decision(msgspec.Struct, frozen=True):
    """What a machine is to do with a claimed process, and how the server's row of it ends, if it does.

    `contradicts`: server and machine cannot both be right.
    """

    disposition: Disposition
    end: tuple[Literal["failed", "unknown"], str] | None = None
    contradicts: bool = False


class Plan(msgspec.Struct):
    """The answer to a registration, and what it changes: ends of processes and of actions.

    `room`: bytes of payloads that the answer may still have.
    """

    directives: list[ProcessDirective]
    processes: list[Ending]
    actions: list[Ending]
    contradictions: list[str]
    room: int = PAYLOADS_BYTES


def resolved_of(claims: Sequence[ProcessClaim], held: Sequence[HeldProcess]) -> dict[UUID, int]:
    """Return, for each process that is looked at, up to which action its machine has done with them all.

    Of a process that is not claimed, only open actions matter.
    """
    resolved = {process.id: 2**63 - 1 for process in held}
    for claim in claims:
        process_id = claimed_id(claim)
        if process_id in resolved:
            resolved[process_id] = claim.resolved_action_seq
    return resolved


def claimed_id(claim: ProcessClaim) -> UUID | None:
    """Return the process that a claim names; None for what is no id."""
    try:
        return decode(IdKind.PROCESS, claim.process_id)
    except InvalidPublicId:
        return None


def plan(claims: Sequence[ProcessClaim], held: Sequence[HeldProcess], actions: Sequence[HeldAction]) -> Plan:
    """Compare what a machine claims with what is stored of it, locked, after its accepted reads were queued again.

    One directive for each claim, in the order of the claims.
    """
    stored = {process.id: process for process in held}
    by_process: dict[UUID, list[HeldAction]] = defaultdict(list)
    for action in actions:
        by_process[action.process_id].append(action)
    made = Plan([], [], [], [])
    claimed = set()
    for claim in claims:
        process_id = claimed_id(claim)
        process = stored.get(process_id) if process_id is not None else None
        if process is not None:
            claimed.add(process.id)
        _decide(made, claim, process, by_process[process.id] if process is not None else [])
    for process in held:
        if process.id not in claimed:
            _unclaimed(made, process, by_process[process.id])
    return made


def is_prepared(claim: ProcessClaim) -> bool:
    """Whether a machine only got a process ready. There is nothing to stop then: a daemon refuses to release it."""
    return claim.phase in ("preparing", "prepared") and not claim.execution_committed


def decide_process(state: str, claim: ProcessClaim) -> Decision:
    """Return the row of the first table that fits a stored state and a claim."""
    prepared = is_prepared(claim)
    if state in OVER:
        return Decision("close_preparation" if prepared else "release")
    if state == "queued":
        if prepared:
            return Decision("close_preparation")
        # It was granted once, and the database has forgotten. What it did is not known, so it must not run again.
        return Decision("release", ("unknown", CONFLICT), contradicts=True)
    if claim.phase == "terminal":
        return Decision("retain")
    if claim.execution_committed:
        return Decision("retain") if claim.supervisor_live else Decision("release", ("unknown", MISSING))
    if state == "running":
        return Decision("close_preparation" if prepared else "release", ("unknown", CONFLICT), contradicts=True)
    return Decision("start") if claim.supervisor_live else Decision("release", ("failed", NOT_STARTED))


def decide_action(
    action: HeldAction, local: ActionClaim | None, *, live: bool, deliverable: bool
) -> tuple[Literal["apply", "retain", "settle", "release"] | None, tuple[str, str] | None]:
    """Return the row of the second table that fits: the disposition (None: not mentioned), and the end of the action.

    `live`: the process's supervisor lives. `deliverable`: the process goes on and takes actions.
    """
    if local is not None:
        return _decide_present(action, local, live=live)
    if action.state == "accepted":
        return ("apply", None) if deliverable else ("release", ("failed", NOT_DELIVERED))
    if action.state == "queued" or (action.state == "applied" and action.reason_code == ALREADY_STOPPED):
        return None, None
    return "release", None


def _decide_present(
    action: HeldAction, local: ActionClaim, *, live: bool
) -> tuple[Literal["retain", "settle", "release"], tuple[str, str] | None]:
    terminal = local.position == "terminal"
    if action.state == "queued":
        return ("settle" if terminal else "release"), ("unknown", CONFLICT)
    if action.state == "accepted":
        return ("retain", None) if terminal or live else ("release", ("unknown", UNRECOVERABLE))
    if terminal:
        return "settle", None
    return ("retain" if live else "release"), None


def _decide(made: Plan, claim: ProcessClaim, process: HeldProcess | None, actions: Sequence[HeldAction]) -> None:
    if process is None:
        # Another machine's, or of a database that was set back: whatever runs there under that name has to stop.
        made.contradictions.append(claim.process_id)
        disposition: Disposition = "close_preparation" if is_prepared(claim) else "release"
        made.directives.append(_directive(claim, disposition, [_stray(local) for local in claim.actions]))
        return
    decision = decide_process(process.state, claim)
    if decision.contradicts:
        made.contradictions.append(claim.process_id)
    if decision.end is not None:
        made.processes.append(Ending(process.id, *decision.end))
    told = _actions(made, claim, decision, actions)
    made.directives.append(_directive(claim, decision.disposition, told))


def _actions(
    made: Plan, claim: ProcessClaim, decision: Decision, actions: Sequence[HeldAction]
) -> list[ActionDirective]:
    goes_on = decision.disposition in ("start", "retain") and claim.phase != "terminal" and claim.supervisor_live
    deliverable = goes_on and not claim.action_admission_closed
    locals_ = {local.process_action_id: local for local in claim.actions}
    told = []
    for action in actions:
        if action.seq <= claim.resolved_action_seq:
            if action.state == "accepted":
                # The machine has done with it and nobody heard how.
                made.actions.append(Ending(action.id, "unknown", UNRECOVERABLE))
            continue
        local = locals_.pop(encode(IdKind.PROCESS_ACTION, action.id), None)
        size = len(action.payload.encode())
        fits = deliverable and size <= made.room
        disposition, end = decide_action(action, local, live=claim.supervisor_live, deliverable=fits)
        if disposition == "apply":
            made.room -= size
        if end is not None:
            made.actions.append(Ending(action.id, *end))
        if disposition is not None:
            told.append(_told(action, disposition))
    told += [_stray(local) for local in locals_.values()]
    return sorted(told, key=lambda directive: directive.seq)


def _unclaimed(made: Plan, process: HeldProcess, actions: Sequence[HeldAction]) -> None:
    if process.state in ("starting", "running"):
        made.processes.append(Ending(process.id, "unknown", MISSING))
    if process.state == "queued":
        return
    for action in actions:
        if action.state == "accepted":
            made.actions.append(Ending(action.id, "unknown", UNRECOVERABLE))
        elif action.state not in ACTION_OVER and action.kind != "read" and process.state in OVER:
            made.actions.append(Ending(action.id, "failed", "process_terminal"))


def _directive(claim: ProcessClaim, disposition: Disposition, actions: Sequence[ActionDirective]) -> ProcessDirective:
    return ProcessDirective(
        process_id=claim.process_id,
        supervisor_instance_id=claim.supervisor_instance_id,
        disposition=disposition,
        actions=actions,
    )


def _told(action: HeldAction, disposition: Literal["apply", "retain", "settle", "release"]) -> ActionDirective:
    directive = ActionDirective(
        process_action_id=encode(IdKind.PROCESS_ACTION, action.id),
        seq=action.seq,
        action_kind=cast("ActionKind", action.kind),
        disposition=disposition,
    )
    if disposition != "apply":
        return directive  # without a payload, and not with an empty one, which would be no JSON
    return msgspec.structs.replace(directive, payload=msgspec.Raw(action.payload.encode()))


def _stray(local: ActionClaim) -> ActionDirective:
    """Return what is to become of an action that is not stored.

    A daemon forgets the outcome of one only when that was reported and acknowledged, and refuses to release it before.
    """
    return ActionDirective(
        process_action_id=local.process_action_id,
        seq=local.seq,
        action_kind=local.action_kind,
        disposition="settle" if local.position == "terminal" else "release",
    )
