"""Where the contents of files are: in Postgres, or in an object store, behind one small interface.

A content is named by organization and SHA-256 and never changes, so every write may be repeated and every read may be
answered from memory. The memory is bounded in bytes: requests to models need the same files at every step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol
from uuid import UUID

from omnara.db import artifacts
from omnara.db.artifacts import ArtifactRow, Place
from omnara.db.connection import Connection
from omnara.db.pool import ApiPool
from omnara.errors import Unavailable

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""How much of the contents that models are shown is kept in memory, in one process."""


class ContentLost(Unavailable):
    """The content of a file is gone from where it was kept. It will not come back by itself."""


class ObjectStore(Protocol):
    """Keeps whole objects under names. Failures are raised as `Unavailable`."""

    async def put(self, name: str, data: bytes) -> None:
        """Write an object, or the same one again."""
        ...

    async def get(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`. Raises `ContentLost` when the object is not there."""
        ...

    async def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no failure."""
        ...


def object_name(org_id: UUID, digest: bytes) -> str:
    """The name of a content in an object store."""
    return f"artifacts/{org_id}/{digest.hex()}"


class Blobs:
    """Contents by organization and digest. One per process; `objects` is where new ones go, or None for Postgres."""

    def __init__(self, objects: ObjectStore | None = None, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._objects = objects
        self._limit = memory_bytes
        self._memory: OrderedDict[tuple[UUID, bytes], bytes] = OrderedDict()
        self.memory_used = 0
        """Bytes held in memory."""

    async def put(self, db: ApiPool, org_id: UUID, digest: bytes, data: bytes) -> None:
        """Store a content unless it is there. Own transaction; nothing refers to it yet. Raises DatabaseUnavailable."""

        async def touch(connection: Connection) -> bool:
            return await artifacts.touch_blob(connection, org_id, digest)

        if await db.run(touch):
            return
        place: Place = "postgres"
        if self._objects is not None:
            # Before the row that says so: an object without a row is only waste, a row without its object is a loss.
            await self._objects.put(object_name(org_id, digest), data)
            place = "object_store"

        async def write(connection: Connection) -> None:
            await artifacts.write_blob(connection, org_id, digest, data, place=place)

        await db.run(write)

    async def read(self, db: ApiPool, row: ArtifactRow, start: int, stop: int) -> bytes:
        """Return the bytes of a file from `start` up to `stop`. Raises Unavailable, ContentLost."""
        if start >= stop:
            return b""
        if row.place == "object_store":
            if self._objects is None:
                raise Unavailable("the object store of this file is not configured here")
            return await self._objects.get(object_name(row.org_id, row.digest), start, stop)
        first, last = start // row.chunk_bytes, (stop - 1) // row.chunk_bytes

        async def work(connection: Connection) -> list[bytes]:
            return await artifacts.read_chunks(connection, row, first, last)

        found = b"".join(await db.run(work))
        if len(found) < min(stop, row.size) - first * row.chunk_bytes:
            raise ContentLost("a part of the file is missing")
        return found[start - first * row.chunk_bytes : stop - first * row.chunk_bytes]

    async def whole(self, db: ApiPool, row: ArtifactRow) -> bytes:
        """Return a whole content, and keep it in memory as long as there is room. Raises as `read`."""
        key = (row.org_id, row.digest)
        found = self._memory.get(key)
        if found is not None:
            self._memory.move_to_end(key)
            return found
        data = await self.read(db, row, 0, row.size)
        if key not in self._memory:  # another step may have read it meanwhile
            self._memory[key] = data
            self.memory_used += len(data)
        while self.memory_used > self._limit:
            _, oldest = self._memory.popitem(last=False)
            self.memory_used -= len(oldest)
        return data

    async def sweep(self, db: ApiPool, older_than_s: float) -> int:
        """Remove some of the contents that nothing came to refer to; return how many. Raises as `read`."""

        async def work(connection: Connection) -> list[tuple[UUID, bytes, Place]]:
            return await artifacts.remove_unreferenced(connection, older_than_s)

        removed = await db.run(work)
        for org_id, digest, place in removed:
            if place == "object_store" and self._objects is not None:
                await self._objects.delete(object_name(org_id, digest))
        return len(removed)
