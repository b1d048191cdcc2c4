"""The files of agents, as tools see them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from omnara.clock import monotonic
from omnara.db import agents, artifacts
from omnara.db.artifacts import ArtifactRow
from omnara.db.connection import Connection
from omnara.db.pool import ApiPool
from omnara.domain.content import ResultBlock, StructuredDataBlock, TextBlock
from omnara.engine.artifacts import artifact_uuid, attach
from omnara.engine.artifacts_overflow import is_too_long, preview, spilled
from omnara.engine.artifacts_store import Blobs
from omnara.errors import Unavailable
from omnara.ids import IdKind, encode
from omnara.log import get_logger
from omnara.tools.files import StoredFile

log = get_logger(__name__)

PATIENCE_S: Final = 30.0
"""How long a finished call waits for the place of its long result. Its effect is done, so it is not failed."""
_PAUSE_S: Final = 0.5


class AgentFiles:
    """A `FileStore` on artifacts."""

    def __init__(self, db: ApiPool, blobs: Blobs) -> None:
        self._db = db
        self._blobs = blobs

    async def find(self, agent_id: UUID, artifact_id: str) -> StoredFile | None:
        """See `FileStore.find`."""
        value = artifact_uuid(artifact_id)
        if value is None:
            return None
        async with self._db.acquire() as connection:
            found = await artifacts.find_artifacts(connection, agent_id, [value])
        return _stored(found[0]) if found else None

    async def texts(self, agent_id: UUID, limit: int) -> list[StoredFile]:
        """See `FileStore.texts`."""
        async with self._db.acquire() as connection:
            return [_stored(row) for row in await artifacts.newest_texts(connection, agent_id, limit)]

    async def read(self, file: StoredFile, start: int, stop: int) -> bytes:
        """See `FileStore.read`."""
        assert isinstance(file.handle, ArtifactRow)
        return await self._blobs.read(self._db, file.handle, start, stop)

    async def spill(self, agent_id: UUID, tool: str, blocks: Sequence[ResultBlock]) -> list[ResultBlock]:
        """See `FileStore.spill`. Without the database for a while, the rest of the result is given up, not the call."""
        if not is_too_long(blocks):
            return list(blocks)  # without a visit to the database: nearly every result ends here
        end = monotonic() + PATIENCE_S
        while True:
            try:
                return await self._spill(agent_id, tool, blocks)
            except Unavailable as error:
                if monotonic() > end:
                    log.warning("long_result_cut", tool=tool, error=str(error))
                    return [_cut(block) for block in blocks]
            await asyncio.sleep(_PAUSE_S)

    async def _spill(self, agent_id: UUID, tool: str, blocks: Sequence[ResultBlock]) -> list[ResultBlock]:
        async def locate(connection: Connection) -> agents.AgentRef | None:
            return await agents.locate_agent(connection, agent_id)

        agent = await self._db.run(locate)
        if agent is None:
            return list(blocks)
        kept, taken = await spilled(self._db, self._blobs, agent.org_id, tool, blocks)

        async def work(connection: Connection) -> None:
            await attach(connection, agent, taken, loose=True)

        if taken.files:
            await self._db.run(work)
        return kept


def _cut(block: ResultBlock) -> ResultBlock:
    if isinstance(block, TextBlock):
        return TextBlock(preview(block.text.encode("utf-8", "replace"), ""), block.metadata)
    if isinstance(block, StructuredDataBlock):
        return StructuredDataBlock({"note": "the data is too long and could not be stored"})
    return block


def _stored(row: ArtifactRow) -> StoredFile:
    return StoredFile(encode(IdKind.ARTIFACT, row.id), row.media_type, row.filename or "", row.size, row)
