"""Files: contents by digest, in chunks, and the artifacts of agents that refer to them.

A content is written before the transaction that refers to it, since a big write must not be made under the lock of an
agent; what nothing came to refer to is removed later. Source: coordination §9 (short transactions under a hot row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("artifacts")

CHUNK_BYTES: Final = 512 * 1024
"""Size of the pieces of new contents: small enough to hold one per reader, large enough for few round trips."""

Place = Literal["postgres", "object_store"]


class NewFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is about to belong to an agent. `width` and `height` of pictures, in pixels."""

    id: UUID
    digest: bytes
    size: int
    media_type: str
    filename: str | None = None
    width: int | None = None
    height: int | None = None


class ArtifactRow(msgspec.Struct, frozen=True):
    """A stored file of an agent, and how its content is kept. `size` in bytes."""

    agent_id: UUID
    id: UUID
    org_id: UUID
    digest: bytes
    size: int
    media_type: str
    filename: str | None
    width: int | None
    height: int | None
    created_at: datetime
    chunk_bytes: int
    place: Place


async def touch_blob(connection: Connection, org_id: UUID, digest: bytes) -> bool:
    """Return whether the content is there; then it stays for a while, even if nothing refers to it."""
    return await connection.fetchval(_SQL["touch_blob"], org_id, digest) is not None


async def write_blob(connection: Connection, org_id: UUID, digest: bytes, data: bytes, *, place: Place) -> None:
    """Write a content in the caller's transaction, or nothing if it is there. `place` elsewhere writes no chunks."""
    added = await connection.fetchval(_SQL["insert_blob"], org_id, digest, len(data), CHUNK_BYTES, place)
    if added is None or place != "postgres":
        return
    for ordinal, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        await connection.execute(_SQL["insert_chunk"], org_id, digest, ordinal, data[start : start + CHUNK_BYTES])


async def insert_artifacts(
    connection: Connection, agent_id: UUID, org_id: UUID, files: Sequence[NewFile], *, loose: bool = False
) -> None:
    """Add files to an agent, in the transaction that writes what refers to them; `loose`: in one before that.

    Their contents must be there.
    """
    await connection.execute(_SQL["refer_to_blobs"], org_id, [file.digest for file in files])
    await connection.execute(
        _SQL["insert_artifacts"],
        agent_id,
        org_id,
        [file.id for file in files],
        [file.digest for file in files],
        [file.size for file in files],
        [file.media_type for file in files],
        [file.filename for file in files],
        [file.width for file in files],
        [file.height for file in files],
        loose,
    )


async def find_artifacts(connection: Connection, agent_id: UUID, ids: Sequence[UUID]) -> list[ArtifactRow]:
    """Return those of the files that the agent has, in no order."""
    return [ArtifactRow(*row) for row in await connection.fetch(_SQL["find_artifacts"], agent_id, list(ids))]


async def newest_texts(connection: Connection, agent_id: UUID, limit: int) -> list[ArtifactRow]:
    """Return the newest text files of an agent."""
    return [ArtifactRow(*row) for row in await connection.fetch(_SQL["newest_texts"], agent_id, limit)]


async def read_chunks(connection: Connection, row: ArtifactRow, first: int, last: int) -> list[bytes]:
    """Return the chunks `first` to `last`, both included, of a content kept here."""
    return [chunk[0] for chunk in await connection.fetch(_SQL["read_chunks"], row.org_id, row.digest, first, last)]


async def agents_with_loose_files(connection: Connection, older_than_s: float) -> list[UUID]:
    """Return up to 100 agents with files that may be referred to by nothing."""
    return [row[0] for row in await connection.fetch(_SQL["agents_with_loose_files"], older_than_s)]


async def loose_files(connection: Connection, agent_id: UUID, older_than_s: float) -> list[UUID]:
    """Return the files of an agent of which it is open whether anything refers to them."""
    return [row[0] for row in await connection.fetch(_SQL["loose_files"], agent_id, older_than_s)]


async def settle_files(connection: Connection, agent_id: UUID, files: Mapping[UUID, str]) -> set[UUID]:
    """Take the mark off those of `files` (public ids by id) that the log mentions, and return them."""
    rows = await connection.fetch(_SQL["settle_files"], agent_id, list(files), list(files.values()))
    return {row[0] for row in rows}


async def remove_loose_files(
    connection: Connection, agent_id: UUID, files: Mapping[UUID, str], older_than_s: float
) -> int:
    """Remove those of `files` that nothing mentions, and free their contents; return how many went.

    In a transaction whose first statement locked the agent's hot row: what was written before is seen then.
    """
    await connection.execute(_SQL["lock_contents"], agent_id, list(files))
    row = await connection.fetchrow(
        _SQL["remove_loose_files"], agent_id, list(files), list(files.values()), older_than_s
    )
    return 0 if row is None else int(row[0])


async def remove_unreferenced(connection: Connection, older_than_s: float) -> list[tuple[UUID, bytes, Place]]:
    """Remove up to 100 contents that nothing refers to; return organization, digest and place of each."""
    return [tuple(row) for row in await connection.fetch(_SQL["remove_unreferenced"], older_than_s)]
