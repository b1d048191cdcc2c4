"""Inputs: messages that wait for admission, and the controls, answers and config changes that enter the log at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("inputs")


class InputRow(msgspec.Struct, frozen=True):
    """An input. `content` is the JSON text of its blocks, `metadata` JSON text or None."""

    id: UUID
    agent_id: UUID
    kind: str
    delivery_mode: str
    state: str
    content: str
    metadata: str | None
    actor_id: UUID | None
    control_type: str | None
    interaction_id: UUID | None
    config_id: UUID | None
    event_sequence: int | None
    queued_at: datetime


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A content input to accept."""

    id: UUID
    delivery_mode: str
    content: str
    metadata: str | None = None
    actor_id: UUID | None = None
    key: str | None = None


class ResolvedInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input whose event is written in the same transaction."""

    id: UUID
    kind: str
    event_sequence: int
    metadata: str | None = None
    actor_id: UUID | None = None
    control_type: str | None = None
    interaction_id: UUID | None = None
    config_id: UUID | None = None
    key: str | None = None


async def find_by_key(connection: Connection, agent_id: UUID, key: str) -> InputRow | None:
    """Return the input of an agent that used an Idempotency-Key."""
    row = await connection.fetchrow(_SQL["find_input_by_key"], agent_id, key)
    return None if row is None else InputRow(*row)


async def receive(connection: Connection, agent_id: UUID, message: NewMessage) -> InputRow | None:
    """Accept a message in one statement: lock, rank, wake, insert. None: its key is used or the agent archived."""
    row = await connection.fetchrow(
        _SQL["receive_input"],
        agent_id,
        message.id,
        message.delivery_mode,
        message.content,
        message.metadata,
        message.actor_id,
        message.key,
    )
    return None if row is None else InputRow(*row)


async def insert_received(connection: Connection, agent_id: UUID, message: NewMessage, rank: int) -> InputRow:
    """Insert a message of a locked agent at `rank`, which the caller takes from the hot row."""
    row = await connection.fetchrow(
        _SQL["insert_received"],
        agent_id,
        message.id,
        message.delivery_mode,
        rank,
        message.content,
        message.metadata,
        message.actor_id,
        message.key,
    )
    assert row is not None
    return InputRow(*row)


async def insert_resolved(connection: Connection, agent_id: UUID, new: ResolvedInput) -> InputRow:
    """Insert an input of a locked agent together with the event at `event_sequence`."""
    row = await connection.fetchrow(
        _SQL["insert_resolved"],
        agent_id,
        new.id,
        new.kind,
        new.metadata,
        new.actor_id,
        new.control_type,
        new.interaction_id,
        new.config_id,
        new.key,
        new.event_sequence,
    )
    assert row is not None
    return InputRow(*row)


async def cancel_waiting(connection: Connection, agent_id: UUID, modes: Sequence[str]) -> int:
    """Cancel the received inputs of a locked agent with these delivery modes; return how many."""
    return len(await connection.fetch(_SQL["cancel_waiting"], agent_id, list(modes)))


async def has_waiting(connection: Connection, agent_id: UUID) -> bool:
    """Whether an input of a locked agent waits to be admitted."""
    return bool(await connection.fetchval(_SQL["has_waiting"], agent_id))
