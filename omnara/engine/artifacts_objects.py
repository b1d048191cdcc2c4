"""Contents of files in S3, Google Cloud Storage, Azure or a directory, by way of `obstore`.

Optional: without the setting nothing of this is loaded. Credentials are found by the library where its provider's own
tools look for them. Source: DESIGN §7 (one small interface per outside part).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from omnara.engine.artifacts_store import ContentLost, ObjectStore
from omnara.errors import ConfigurationError, Unavailable
from omnara.log import get_logger

log = get_logger(__name__)

LIMIT_S: Final = 60.0
"""For one object, of at most 48 MiB, with the library's own repeats."""


def open_objects(url: str) -> ObjectStore:
    """Return the store that a URL names, `s3://bucket/prefix` for one. No I/O. Raises ConfigurationError."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigurationError(
            "OMNARA_ARTIFACT_STORE needs the extra `objects`: pip install 'omnara[objects]'"
        ) from None
    try:
        return Objects(from_url(url), BaseError)
    except (BaseError, ValueError):
        raise ConfigurationError(
            "OMNARA_ARTIFACT_STORE is not a URL of an object store that can be used, such as s3://bucket/prefix"
        ) from None


class Objects:
    """An `ObjectStore`. `failure` is the base of what the library raises."""

    def __init__(self, store: Any, failure: type[Exception]) -> None:
        self._store = store
        self._failure = failure

    async def put(self, name: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        async with self._guarded("written"):
            await self._store.put_async(name, data)

    async def get(self, name: str, start: int, stop: int) -> bytes:
        """See `ObjectStore.get`."""
        try:
            async with self._guarded("read"):
                return bytes(await self._store.get_range_async(name, start=start, end=stop))
        except FileNotFoundError:
            raise ContentLost("the object of a file is not in the object store") from None

    async def delete(self, name: str) -> None:
        """See `ObjectStore.delete`."""
        try:
            async with self._guarded("deleted"):
                await self._store.delete_async(name)
        except FileNotFoundError:
            return  # another sweep was faster

    @asynccontextmanager
    async def _guarded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(LIMIT_S):
                yield
        except FileNotFoundError:
            raise
        except (self._failure, OSError, TimeoutError) as error:
            # The library's texts name endpoints and buckets: they are for the log.
            log.warning("object_store_failed", what=what, error=type(error).__name__, detail=str(error)[:500])
            raise Unavailable(f"a file could not be {what} in the object store") from error
