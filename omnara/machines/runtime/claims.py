"""What a runtime claims of a home's processes at a registration, and whether the answer fits.

Source: machines.md §5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnara.machines import wire
from omnara.machines.processes import ActionRecord, ProcessRecord

__all__ = ["DirectivesRefused", "check_directives", "claim", "settled"]


class DirectivesRefused(ValueError):
    """The server's directives do not answer the claims one by one; nothing was done, and the next registration may."""


def settled(record: ProcessRecord) -> bool:
    """Say whether the server knows all about a process, so that there is nothing to claim: only its output is kept."""
    return record.exit_acknowledged and all(action.acknowledged for action in record.actions)


def claim(record: ProcessRecord) -> wire.ProcessClaim:
    """Return the claim for one process.

    A prepared process counts as live: this home can still start it, whether or not something waits there to do so.
    """
    resolved = _resolved(record.actions)
    live = record.supervisor_live or (record.phase == "prepared" and not record.execution_committed)
    return wire.ProcessClaim(
        process_id=record.process_id,
        supervisor_instance_id=record.supervisor_id,
        phase="terminal" if record.exit is not None else record.phase,
        supervisor_live=live,
        execution_committed=record.execution_committed,
        action_admission_closed=record.exit is not None
        or not live
        or any(action.kind == "terminate" for action in record.actions),
        resolved_action_seq=resolved,
        actions=[
            wire.ActionClaim(
                process_action_id=action.action_id,
                seq=action.seq,
                action_kind=action.kind,
                position="effect_committed" if action.outcome is None else "terminal",
            )
            for action in sorted(record.actions, key=lambda action: action.seq)
            if action.seq > resolved
        ],
    )


def _resolved(actions: Sequence[ActionRecord]) -> int:
    """The highest sequence up to which the server has acknowledged everything that is marked here."""
    first_open = min((action.seq for action in actions if not action.acknowledged), default=None)
    return max(
        (action.seq for action in actions if action.acknowledged and (first_open is None or action.seq < first_open)),
        default=0,
    )


def check_directives(claimed: Mapping[str, str], directives: Sequence[wire.ProcessDirective]) -> None:
    """Raise DirectivesRefused unless there is exactly one directive for each claim (process to supervisor)."""
    answered = [directive.process_id for directive in directives]
    if sorted(answered) != sorted(claimed):
        raise DirectivesRefused("the server did not answer each claimed process once")
    for directive in directives:
        if claimed[directive.process_id] != directive.supervisor_instance_id:
            raise DirectivesRefused("the server answered for another launch of a claimed process")
