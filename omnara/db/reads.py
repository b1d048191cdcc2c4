"""What the API shows: pages of the log, turns, agents, the journal. JSON columns come as text, to be spliced unread.

Nothing here locks or writes; a page is one statement, and so one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from omnara.db.agents import AgentRow
from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("reads")

_PAGE_BYTES: Final = 1024 * 1024
"""Bytes after which a page of events, or of turns with theirs, ends early: a model may say megabytes in each of five
hundred of them."""

_LARGEST: Final = 2**53 - 1
"""The largest integer that every reader of JSON keeps exact: no sum goes beyond it."""

AgentSort = Literal["created_at", "-created_at", "updated_at", "-updated_at", "name", "-name"]

_AGENT_LISTS: Final[dict[AgentSort, str]] = {
    "created_at": "list_agents_created_asc",
    "-created_at": "list_agents_created_desc",
    "updated_at": "list_agents_updated_asc",
    "-updated_at": "list_agents_updated_desc",
    "name": "list_agents_name_asc",
    "-name": "list_agents_name_desc",
}


class EventRow(msgspec.Struct, frozen=True):
    """One entry of the log. `payload` is the JSON text of the fields that the contract has for its kind."""

    sequence: int
    id: UUID
    kind: str
    turn_id: UUID
    turn_sequence: int
    is_opening: bool
    payload: str
    created_at: datetime


class EventRows(msgspec.Struct, frozen=True):
    """A page of events; `more` says whether there are others behind it."""

    rows: list[EventRow]
    more: bool


class TurnBounds(msgspec.Struct, frozen=True):
    """A turn's range of sequences; `until` is exclusive, None for the turn that is still the last."""

    turn_sequence: int
    first_sequence: int
    until: int | None


class TurnRow(msgspec.Struct, frozen=True):
    """A turn with the sequences of its noteworthy events; `until` and `openings_until` are exclusive."""

    turn_sequence: int
    id: UUID
    started_at: datetime
    first_sequence: int
    until: int
    openings_until: int
    latest_semantic: int | None


class StatusRow(msgspec.Struct, frozen=True):
    """An agent's derived status and last step. `step_error` is JSON text."""

    status: str
    name: str
    model: str
    temperature: float | None
    system_prompt: str
    last_step: int
    last_sequence: int
    turns: int
    open_calls: int
    deaths: int
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None
    step_kind: str | None
    step_state: str | None
    step_attempt: int | None
    step_started_at: datetime | None
    step_finished_at: datetime | None
    next_action: str | None
    step_error: str | None
    step_retry_at: datetime | None
    turn_open: bool
    retry_at: datetime | None


class UsageSums(msgspec.Struct, frozen=True):
    """Tokens by counter. `through`: the step up to which they may be kept, if any; `steps`: how many were added up."""

    sums: dict[str, int]
    through: int | None
    steps: int


class StepRow(msgspec.Struct, frozen=True):
    """One row of the view `agent_steps`; JSON columns are texts."""

    step: int
    timestamp: datetime
    finished_at: datetime | None
    kind: str
    attempt: int
    status: str
    tool_request: str | None
    tool_response: str | None
    llm_output: str | None
    next_action: str | None
    secrets_used: list[str]
    error: str | None
    usage: str | None


class OverviewRow(msgspec.Struct, frozen=True):
    """One row of the view `agents_overview`, for lists that show the status."""

    agent_id: UUID
    name: str
    status: str
    model: str
    last_step: int
    last_sequence: int
    turns: int
    open_calls: int
    deaths: int
    created_at: datetime
    updated_at: datetime
    archived_at: datetime | None


async def events_after(connection: Connection, agent_id: UUID, sequence: int, limit: int) -> EventRows:
    """Return up to `limit` events after `sequence`, oldest first; fewer when they are large."""
    return _event_rows(await connection.fetch(_SQL["events_after"], agent_id, sequence, limit + 1, _PAGE_BYTES), limit)


async def events_before(connection: Connection, agent_id: UUID, sequence: int, limit: int) -> EventRows:
    """Return up to `limit` events before `sequence`, newest first; fewer when they are large."""
    return _event_rows(await connection.fetch(_SQL["events_before"], agent_id, sequence, limit + 1, _PAGE_BYTES), limit)


async def events_at(connection: Connection, agent_id: UUID, sequences: Sequence[int]) -> list[EventRow]:
    """Return the events with these sequences, oldest first."""
    return [EventRow(*row) for row in await connection.fetch(_SQL["events_at"], agent_id, list(sequences))]


async def events_of_turns(
    connection: Connection, agent_id: UUID, sequences: Sequence[int], turns: Sequence[int]
) -> dict[int, dict[int, EventRow]]:
    """Return the events with these sequences by their turn (parallel, numbers of turns) and sequence.

    Whole turns only, from the newest on: fewer when they are large, and at least one.
    """
    found: dict[int, dict[int, EventRow]] = {}
    for row in await connection.fetch(_SQL["events_of_turns"], agent_id, sequences, turns, _PAGE_BYTES):
        found.setdefault(row[0], {})[row[1]] = EventRow(*tuple(row)[1:])
    return found


async def turn_bounds(connection: Connection, agent_id: UUID, turn_id: UUID) -> TurnBounds | None:
    """Return where a turn begins and ends."""
    row = await connection.fetchrow(_SQL["turn_bounds"], agent_id, turn_id)
    return None if row is None else TurnBounds(*row)


async def turn_events(connection: Connection, agent_id: UUID, first: int, until: int, limit: int) -> EventRows:
    """Return up to `limit` events from `first` on and before `until`, newest first; fewer when they are large."""
    rows = await connection.fetch(_SQL["turn_events"], agent_id, first, until, limit + 1, _PAGE_BYTES)
    return _event_rows(rows, limit)


def _event_rows(rows: Sequence[Any], limit: int) -> EventRows:
    kept = [EventRow(*tuple(row)[:-1]) for row in rows[:limit]]
    return EventRows(kept, bool(rows) and rows[0]["found"] > len(kept))


async def list_turns(connection: Connection, agent_id: UUID, before: int, limit: int) -> list[TurnRow]:
    """Return turns before turn number `before`, newest first."""
    return [TurnRow(*row) for row in await connection.fetch(_SQL["list_turns"], agent_id, before, limit)]


async def list_agents(
    connection: Connection,
    project_id: UUID,
    *,
    sort: AgentSort,
    pattern: str | None,
    after: tuple[datetime | str, UUID] | None,
    limit: int,
) -> list[AgentRow]:
    """Return active agents after a (sort value, id) key; `pattern` is an ILIKE pattern."""
    value, last_id = after or (None, None)
    rows = await connection.fetch(_SQL[_AGENT_LISTS[sort]], project_id, pattern, value, last_id, limit)
    return [AgentRow(*row) for row in rows]


async def list_overview(
    connection: Connection,
    project_id: UUID,
    *,
    status: str | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
) -> list[OverviewRow]:
    """Return agents with their status, newest first, after a (created_at, id) key; archived ones only if asked for."""
    time, last_id = after or (None, None)
    query = _SQL["list_overview_archived" if status == "archived" else "list_overview"]
    rows = await connection.fetch(query, project_id, status, time, last_id, limit)
    return [OverviewRow(*row) for row in rows]


async def agent_status(connection: Connection, agent_id: UUID) -> StatusRow | None:
    """Return the status of an agent and its last step."""
    row = await connection.fetchrow(_SQL["agent_status"], agent_id)
    return None if row is None else StatusRow(*row)


async def last_output(connection: Connection, agent_id: UUID) -> str | None:
    """Return the payload of the newest model output that has text."""
    payload: str | None = await connection.fetchval(_SQL["last_output"], agent_id)
    return payload


async def usage_sums(connection: Connection, agent_id: UUID) -> UsageSums:
    """Return the tokens of all steps, by counter. Reads the steps that nobody has added up yet."""
    row = await connection.fetchrow(_SQL["usage_sums"], agent_id)
    assert row is not None, "a select without a table has a row"
    sums: dict[str, int] = {}
    for text in (row["kept"], row["added"]):
        for counter, total in msgspec.json.decode(text or "{}", type=dict[str, int]).items():
            sums[counter] = min(sums.get(counter, 0) + total, _LARGEST)
    over, under_way = row["over"], row["under_way"]
    is_settled = over is not None and (under_way is None or under_way > over)
    return UsageSums(dict(sorted(sums.items())), over if is_settled else None, row["steps"])


async def keep_usage(connection: Connection, agent_id: UUID, through: int, sums: dict[str, int]) -> None:
    """Spare the next reader the steps up to `through`, all of which are over. Safe beside others who do the same."""
    await connection.execute(_SQL["keep_usage"], agent_id, through, msgspec.json.encode(sums).decode())


async def list_steps(connection: Connection, agent_id: UUID, after: int, limit: int) -> list[StepRow]:
    """Return journal rows after step `after`, oldest first."""
    return [StepRow(*row) for row in await connection.fetch(_SQL["list_steps"], agent_id, after, limit)]


async def diagnosis(connection: Connection, agent_id: UUID) -> tuple[int, str | None]:
    """Return (deaths in a row, newest step error as JSON text) of an agent."""
    row = await connection.fetchrow(_SQL["diagnosis"], agent_id)
    return (0, None) if row is None else (row[0], row[1])
