"""What compaction asks of the log and the journal."""

from __future__ import annotations

from uuid import UUID

from omnara.db.connection import Connection, Row
from omnara.db.sqlfiles import Queries

_SQL = Queries("compaction")


async def last_checkpoint(connection: Connection, agent_id: UUID, head: int) -> Row | None:
    """Return the raw row of the newest checkpoint up to sequence `head`, or None. It may be damaged, or void."""
    return await connection.fetchrow(_SQL["last_checkpoint"], agent_id, head)


async def is_due(connection: Connection, agent_id: UUID, number: int) -> bool:
    """Return whether a step was a compaction that failed and is to be tried again."""
    return bool(await connection.fetchval(_SQL["is_due"], agent_id, number))
