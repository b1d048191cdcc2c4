"""Stops a bench's Postgres when the bench itself was killed: the one process that the kernel cannot end with it.

The embedded server outlives its starter by design (the next omnara adopts it). So a small child waits for the end of
its input, which comes however the bench ends, and tidies up unless it was told that all is tidy.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from omnara.db.embedded import EmbeddedPostgres

__all__ = ["GuardContestant"]


class GuardContestant:
    """Knows the directory of one embedded server."""

    def __init__(self) -> None:
        self._path: Path | None = None

    async def start(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Watch over `path` from now on."""
        self._path = Path(spec["path"])
        return {}

    async def ask(self, what: str, values: dict[str, Any]) -> dict[str, Any]:
        """`release`: the server is stopped, nothing is left to do."""
        if what != "release":
            raise ValueError(f"unknown request {what!r}")
        self._path = None
        return {}

    async def stop(self) -> None:
        """Stop a server that still runs, and remove its directory."""
        if self._path is None:
            return
        if await EmbeddedPostgres.running_dsn(self._path) is not None:
            async with EmbeddedPostgres(self._path):
                pass
        await asyncio.to_thread(shutil.rmtree, self._path, ignore_errors=True)
