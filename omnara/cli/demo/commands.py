"""What became of the commands: the ledger on the machine against what the agent asked for and was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from omnara.cli.demo.plan import CommandPlan
from omnara.client import Event
from omnara.testing.audit_commands import ledger_name, name_in

__all__ = ["Commands", "count_commands"]

NOT_RUN: Final = frozenset({"execution_not_started", "process_not_accepted"})
"""What the agent may be told of a command that was never begun."""


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that the agent asked for, by what the ledger says of them.

    `repeated`: lines beyond the first that a command wrote of its beginning or end. `lost`: begun and never ended, or
    not begun though nobody was told so. `not_started`: not begun, and the agent was told. `unknown`: the agent was told
    that nobody knows. `left`: what is still there of the machine after the agent's end.
    """

    machine: str
    asked: int
    repeated: int
    lost: int
    not_started: int
    unknown: int
    left: list[str] = []

    def but_left(self, left: list[str]) -> Commands:
        """Return the same with what is left of the machine."""
        return msgspec.structs.replace(self, left=left)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for everything that is not as promised."""
        if self.repeated:
            yield f"{self.repeated} commands ran again"
        if self.lost:
            yield f"{self.lost} commands were lost"
        if self.unknown:
            yield f"of {self.unknown} commands nobody knows what became of them, although only the server died"
        if self.left:
            yield f"the machine was not removed with its agent: {', '.join(self.left)}"


def count_commands(plan: CommandPlan, events: Sequence[Event], ledger: Sequence[str], kind: str) -> Commands:
    """Compare the ledger's lines with the calls and results in an agent's log."""
    names = _asked(events)
    lines = Counter(ledger)
    not_started = [names[call] for call in _not_started(events) if call in names]
    whole = {name: (lines[f"begin {name}"], lines[f"end {name}"]) for name in names.values()}
    foreign = sum(line.partition(" ")[2] not in whole for line in ledger)
    lost = [name for name, found in whole.items() if min(found) == 0 and (name not in not_started or max(found))]
    return Commands(
        machine=kind,
        asked=len(names),
        repeated=sum(max(0, begun - 1) + max(0, ended - 1) for begun, ended in whole.values()) + foreign,
        lost=len(lost) + (ledger_name(plan.file) not in whole),
        not_started=len(not_started),
        unknown=len(_unknown(events)),
    )


def _asked(events: Sequence[Event]) -> dict[str, str]:
    """Names in the ledger of all commands, by the call's id."""
    calls = [call for event in events if event.kind == "model_output" for call in event.tool_calls]
    found = {call["tool_call_id"]: name_in(str(call["input"].get("command"))) for call in calls if _runs(call)}
    return {call: name for call, name in found.items() if name is not None}


def _runs(call: dict[str, Any]) -> bool:
    return bool(call["name"] == "run_command")


def _values(event: Event) -> list[dict[str, Any]]:
    """The JSON objects of a tool result."""
    return [value for value in event.values if isinstance(value, dict)] if event.kind == "tool_result" else []


def _not_started(events: Sequence[Event]) -> set[str]:
    """Calls of which the agent was told that their command was never begun."""
    return {
        str(event.tool_call_id)
        for event in events
        for value in _values(event)
        if not NOT_RUN.isdisjoint({value.get("error"), value.get("error_code")})
    }


def _unknown(events: Sequence[Event]) -> set[str]:
    """Processes of which the agent was told that nobody knows what became of them."""
    return {
        str(value.get("process_id")) for event in events for value in _values(event) if value.get("state") == "unknown"
    }
