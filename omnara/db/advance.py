"""The `advance` statement: turns up to 32 `Advance` values into its parallel arrays and reads the answer.

Kept apart from the other queries because it is the hot path: one prepared statement, one round trip, no per-row work
in Python beyond building the columns. The statement is put together from the parts in `advance.sql`. To start a part
costs Postgres time even when it has no rows, so the two ends of a claim, which need few of them, have a statement of
their own; a process prepares three in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries
from omnara.domain.advance import Advance, Advanced

MAX_GROUP = 32
"""Agents in one statement. Source: coordination §10."""

MAX_GROUP_BYTES = 1_000_000
"""Bytes in one statement. Source: coordination §10."""

Columns = Callable[[Sequence[Advance]], list[list[Any]]]
_SQL: Final = Queries("advance")
_PARAMETER: Final = re.compile(r"\$(\d+)")


class Statement:
    """The parts of `advance.sql` that a group of saves needs, as one text and the columns of its parameters."""

    def __init__(self, *parts: str) -> None:
        self.text = "with " + _SQL["taken"]
        self._columns = [_PARTS[part] for part in parts]
        count = _parameters(_SQL["taken"])
        for part in parts:
            self.text += ",\n" + _PARAMETER.sub(lambda found: f"${int(found[1]) + count}", _SQL[part])  # noqa: B023
            count += _parameters(_SQL[part])
        self.text += "\n" + _SQL["answer"]

    def parameters(self, worker_id: UUID, items: Sequence[Advance]) -> list[Any]:
        """The parameters for these items, in the order of the items (which must be sorted by agent)."""
        found = [worker_id, *_item_columns(items)]
        for columns in self._columns:
            found += columns(items)
        return found


def statement_for(items: Sequence[Advance]) -> Statement:
    """The smallest of the three statements that writes everything these items ask for."""
    begins = closes = False
    for item in items:
        if item.calls or item.moved or item.asked:
            return WHOLE
        begins = begins or item.begin is not None
        closes = closes or item.close is not None
    return CLOSE if not begins else WHOLE if closes else BEGIN


async def advance(
    connection: Connection, worker_id: UUID, items: Sequence[Advance], timeout_s: float
) -> dict[int, Advanced]:
    """Run the statement; the answer maps the index of an item to its outcome.

    An item that is missing in the answer was either refused by its fence or skipped because its row was locked: only a
    read tells them apart (coordination §10). Commits by itself (autocommit); an exception other than a definite SQL
    error means that the outcome is unknown.
    """
    statement = statement_for(items)
    rows = await connection.fetch(statement.text, *statement.parameters(worker_id, items), timeout=timeout_s)
    return {
        row[0] - 1: Advanced(
            begun=row[1],
            kept=row[2],
            first_sequence=row[3],
            next_sequence=row[4],
            inputs_gen=row[5],
            turn_id=row[6],
            turn_sequence=row[7],
            step_number=row[8],
            batch_sequence=row[9],
            ready=row[10],
            saved_at=row[11],
        )
        for row in rows
    }


def _parameters(text: str) -> int:
    return max((int(number) for number in _PARAMETER.findall(text)), default=0)


def _item_columns(items: Sequence[Advance]) -> list[list[Any]]:
    begins = [item.begin for item in items]
    return [
        [item.agent_id for item in items],
        [item.claim_token for item in items],
        [item.epoch for item in items],
        [item.gen for item in items],
        [item.mode for item in items],
        [len(item.events) for item in items],
        [len(begin.admit) if begin else 0 for begin in begins],
        [item.turn_open for item in items],
        [item.output_position for item in items],
        [item.opened for item in items],
        [item.answered for item in items],
        [item.attempt for item in items],
        [item.retry_s for item in items],
        [item.ready_s for item in items],
        [item.close is not None for item in items],
        [begin.turn_id if begin else None for begin in begins],
        [begin.new_turn if begin else False for begin in begins],
        [item.seen for item in items],
        [item.known_next_sequence for item in items],
        [item.step_number for item in items],
    ]


def _close_columns(items: Sequence[Advance]) -> list[list[Any]]:
    closes = [(number, item.close) for number, item in enumerate(items, 1) if item.close is not None]
    return [
        [number for number, _ in closes],
        [close.number for _, close in closes],
        [close.state for _, close in closes],
        [close.usage for _, close in closes],
        [close.error for _, close in closes],
        [close.next_action for _, close in closes],
    ]


def _begin_columns(items: Sequence[Advance]) -> list[list[Any]]:
    begins = [(number, item.begin) for number, item in enumerate(items, 1) if item.begin is not None]
    return [
        [number for number, _ in begins],
        [begin.kind for _, begin in begins],
        [begin.attempt for _, begin in begins],
        [begin.call_id for _, begin in begins],
        [begin.config_id for _, begin in begins],
        [begin.revision_id for _, begin in begins],
        [begin.secrets or None for _, begin in begins],
    ]


def _event_columns(items: Sequence[Advance]) -> list[list[Any]]:
    rows = []
    for number, item in enumerate(items, 1):
        rows += [(number, position, event) for position, event in enumerate(item.events)]
        if item.begin is not None:
            start = len(item.events)
            rows += [(number, start + offset, entry.event) for offset, entry in enumerate(item.begin.admit)]
    return [
        [number for number, _, _ in rows],
        [position for _, position, _ in rows],
        [event.id for _, _, event in rows],
        [event.kind for _, _, event in rows],
        [event.turn_id for _, _, event in rows],
        [event.turn_sequence for _, _, event in rows],
        [event.is_opening for _, _, event in rows],
        [event.is_semantic for _, _, event in rows],
        [event.payload for _, _, event in rows],
        [event.meta for _, _, event in rows],
        [event.replay for _, _, event in rows],
    ]


def _call_columns(items: Sequence[Advance]) -> list[list[Any]]:
    rows = [(number, item, call) for number, item in enumerate(items, 1) for call in item.calls]
    return [
        [number for number, _, _ in rows],
        [call.ordinal for _, _, call in rows],
        [call.id for _, _, call in rows],
        [item.turn_id for _, item, _ in rows],
        [item.turn_sequence for _, item, _ in rows],
        [call.provider_call_id for _, _, call in rows],
        [call.name for _, _, call in rows],
        [call.type for _, _, call in rows],
        [call.input for _, _, call in rows],
        [call.state for _, _, call in rows],
        [call.outcome for _, _, call in rows],
        [call.result_position for _, _, call in rows],
        [call.run for _, _, call in rows],
    ]


def _move_columns(items: Sequence[Advance]) -> list[list[Any]]:
    moved = [(number, call) for number, item in enumerate(items, 1) for call in item.moved]
    return [
        [number for number, _ in moved],
        [call.id for _, call in moved],
        [call.state for _, call in moved],
        [call.outcome for _, call in moved],
        [call.result_position for _, call in moved],
        [call.from_state for _, call in moved],
    ]


def _form_columns(items: Sequence[Advance]) -> list[list[Any]]:
    asked = [(number, form) for number, item in enumerate(items, 1) for form in item.asked]
    return [
        [number for number, _ in asked],
        [form.id for _, form in asked],
        [form.tool_call_id for _, form in asked],
        [form.kind for _, form in asked],
        [form.request for _, form in asked],
    ]


def _admission_columns(items: Sequence[Advance]) -> list[list[Any]]:
    admitted = [
        (number, entry.input_id, len(item.events) + offset)
        for number, item in enumerate(items, 1)
        if item.begin is not None
        for offset, entry in enumerate(item.begin.admit)
    ]
    return [
        [number for number, _, _ in admitted],
        [input_id for _, input_id, _ in admitted],
        [position for _, _, position in admitted],
    ]


def _no_columns(_: Sequence[Advance]) -> list[list[Any]]:
    return []


_PARTS: Final[dict[str, Columns]] = {
    "events": _event_columns,
    "turns": _no_columns,
    "closed": _close_columns,
    "opened": _begin_columns,
    "calls": _call_columns,
    "moved": _move_columns,
    "asked": _form_columns,
    "admitted": _admission_columns,
}

BEGIN: Final = Statement("events", "turns", "opened", "admitted")
"""The first step of a claim."""
CLOSE: Final = Statement("events", "closed")
"""The last step of a claim, or only the end of the claim."""
WHOLE: Final = Statement(*_PARTS)
"""Everything else."""
