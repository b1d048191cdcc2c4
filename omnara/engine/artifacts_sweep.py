"""Removes files that were written for a result which never came: its worker died, or lost its claim, in between.

The file of a long result is the agent's before the result is in the log, since megabytes are not written in the
statement that saves a step. So it is marked as loose. An hour later the log mentions it, and the mark goes; or it does
not, and the file goes.
Source: coordination §2 (what is decided under a lock is decided in a statement of its own), §9 (hot row first).
"""

from __future__ import annotations

from uuid import UUID

from omnara.db import agents, artifacts
from omnara.db.connection import Connection
from omnara.db.pool import ApiPool
from omnara.ids import IdKind, encode

__all__ = ["sweep_loose_files"]


async def sweep_loose_files(db: ApiPool, older_than_s: float) -> int:
    """Look at up to 100 agents with loose files of that age; return how many files it decided about.

    Transactions of its own, one or two per agent. Several processes may at a time. A file whose agent has a running
    call, or whose content somebody else is about to refer to, is left for a later time. Raises DatabaseUnavailable.
    """

    async def candidates(connection: Connection) -> list[UUID]:
        return await artifacts.agents_with_loose_files(connection, older_than_s)

    return sum([await _sweep_agent(db, agent_id, older_than_s) for agent_id in await db.run(candidates)])


async def _sweep_agent(db: ApiPool, agent_id: UUID, older_than_s: float) -> int:
    async def settle(connection: Connection) -> tuple[int, dict[UUID, str]]:
        ids = await artifacts.loose_files(connection, agent_id, older_than_s)
        files = {file_id: encode(IdKind.ARTIFACT, file_id) for file_id in ids}
        settled = await artifacts.settle_files(connection, agent_id, files)
        return len(settled), {file_id: name for file_id, name in files.items() if file_id not in settled}

    settled, files = await db.run(settle)
    if not files:
        return settled

    async def remove(connection: Connection) -> int:
        await agents.lock_hot_row(connection, agent_id)
        return await artifacts.remove_loose_files(connection, agent_id, files, older_than_s)

    return settled + await db.run(remove)
