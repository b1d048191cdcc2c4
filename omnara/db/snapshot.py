"""What a worker reads under a claim: new events, open calls, waiting inputs, the config."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec

from omnara.db.connection import Connection, Row
from omnara.db.sqlfiles import Queries
from omnara.domain.events import Event, decode_meta, decode_payload
from omnara.domain.step import OpenCall, WaitingInput

_SQL = Queries("snapshot")
_INPUT = msgspec.json.Decoder(dict[str, Any])

EVENT_PAGE = 1000
"""Rows per read of the log; a long history comes in pages so that no single answer grows without bound."""


async def read_events(connection: Connection, agent_id: UUID, from_sequence: int, limit: int = EVENT_PAGE) -> list[Row]:
    """Return raw event rows from a sequence on, oldest first. Decode with `decode_event`, which may raise."""
    return await connection.fetch(_SQL["read_events"], agent_id, from_sequence, limit)


def decode_event(row: Row) -> Event:
    """Validate one row of the log. Raises DamagedEvent."""
    sequence: int = row[0]
    return Event(
        sequence,
        row[1],
        row[2],
        row[3],
        row[4],
        row[5],
        decode_payload(row[2], sequence, row[6]),
        decode_meta(sequence, row[7]),
        row[8],
        row[9],
    )


async def read_open_calls(connection: Connection, agent_id: UUID, output_sequence: int) -> tuple[OpenCall, ...]:
    """Return the calls of one output that have no result yet, in call order."""
    rows = await connection.fetch(_SQL["read_open_calls"], agent_id, output_sequence)
    return tuple(OpenCall(row[0], row[1], row[2], row[3], _INPUT.decode(row[4]), row[5]) for row in rows)


async def read_for_step(
    connection: Connection, agent_id: UUID, from_sequence: int, head: int
) -> tuple[list[tuple[Any, ...]], list[WaitingInput]]:
    """Return raw rows of the log between two sequences (at most a page, as `read_events` gives them), and what waits:
    all steering inputs and the first two queued ones (the second only tells that there are more).
    """
    rows = await connection.fetch(_SQL["read_for_step"], agent_id, from_sequence, head, EVENT_PAGE)
    events = [tuple(row)[1:11] for row in rows if row[0] == 0]
    waiting = [WaitingInput(row[2], row[3], row[1], row[7], row[4], row[11]) for row in rows if row[0]]
    return events, waiting


async def step_config(connection: Connection, agent_id: UUID, number: int) -> UUID | None:
    """Return the config under which a step ran, or None when there is no such step."""
    config_id: UUID | None = await connection.fetchval(_SQL["step_config"], agent_id, number)
    return config_id


async def read_config(connection: Connection, config_id: UUID) -> tuple[UUID, str, UUID] | None:
    """Return (project, compiled definition as JSON text, configured model) of a config."""
    row = await connection.fetchrow(_SQL["read_config"], config_id)
    return None if row is None else (row[1], row[2], row[3])
