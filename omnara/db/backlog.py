"""The order of the messages that wait for an agent: ranks, the gaps between them, and the lanes.

A message is admitted by rank, so moving one is writing one number between two others. All writers here hold the lock on
the agent's hot row, as the worker that admits does. Source: engine.md §8 (backlog).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.inputs import InputRow
from omnara.db.sqlfiles import Queries

_SQL: Final = Queries("backlog")


class Waiting(msgspec.Struct, frozen=True):
    """An input that is in the backlog, or was."""

    kind: str
    delivery_mode: str
    state: str

    def in_lane(self, mode: str) -> bool:
        """Whether it is a message that waits in this lane."""
        return self.kind == "content" and self.delivery_mode == mode and self.state == "received"


class Gap(msgspec.Struct, frozen=True):
    """The rank of a queued message and of its neighbours; None where the queue ends."""

    rank: int
    below: int | None
    above: int | None


class Queued(msgspec.Struct, frozen=True):
    """A queued message with its rank."""

    input: InputRow
    rank: int


async def list_queue(connection: Connection, agent_id: UUID, after: tuple[int, UUID], limit: int) -> list[Queued]:
    """Return waiting queued messages after a (rank, id) key, in the order of their admission."""
    rows = await connection.fetch(_SQL["list_backlog"], agent_id, *after, limit)
    return [Queued(InputRow(*tuple(row)[:-1]), row["rank"]) for row in rows]


async def find(connection: Connection, agent_id: UUID, input_id: UUID) -> Waiting | None:
    """Return what an input of a locked agent is, or None when there is no such input."""
    row = await connection.fetchrow(_SQL["waiting_mode"], agent_id, input_id)
    return None if row is None else Waiting(*row)


async def head(connection: Connection, agent_id: UUID, but: UUID) -> UUID | None:
    """Return the first queued message of a locked agent other than `but`."""
    found: UUID | None = await connection.fetchval(_SQL["queue_head"], agent_id, but)
    return found


async def gap(connection: Connection, agent_id: UUID, anchor_id: UUID, but: UUID) -> Gap | None:
    """Return where a queued message of a locked agent stands, or None when it is not queued. `but` counts as absent."""
    row = await connection.fetchrow(_SQL["queue_gap"], agent_id, but, anchor_id)
    return None if row is None else Gap(*row)


async def renumber(connection: Connection, agent_id: UUID, stride: int) -> None:
    """Space the queue of a locked agent evenly; its order stays."""
    await connection.execute(_SQL["renumber_queue"], agent_id, stride)


async def place(connection: Connection, agent_id: UUID, input_id: UUID, rank: int, mode: str) -> bool:
    """Put a waiting message of a locked agent at a rank of a lane; False when it does not wait."""
    return await connection.fetchrow(_SQL["place_input"], agent_id, input_id, rank, mode) is not None


async def cancel(connection: Connection, agent_id: UUID, input_id: UUID) -> bool:
    """Cancel a queued message of a locked agent; False when it is not queued."""
    return await connection.fetchrow(_SQL["cancel_input"], agent_id, input_id) is not None
