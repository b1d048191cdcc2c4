"""What machines of a bench leave when it is killed in the middle: sandboxes and containers outlive every server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
from aiodocker.exceptions import DockerError

from omnara.machines.docker.layout import DEFAULT_IMAGE
from omnara.machines.posix.sandbox import Bubblewrap
from omnara.machines.providers.docker import DockerProvider
from omnara.machines.providers.local import Unconfined, confinement
from omnara.machines.providers.protocol import ProviderUnavailable

__all__ = ["docker_problem", "local_problem", "swept"]


async def local_problem() -> str | None:
    """Say why this computer can have no local machines; None when it can."""
    try:
        await asyncio.to_thread(confinement)
    except Unconfined as error:
        return str(error)
    return None


async def docker_problem() -> str | None:
    """Say why no container can be made here; None when it can."""
    provider = DockerProvider()
    try:
        await provider.host()
        async with provider.engine.call() as docker:
            await docker.images.inspect(DEFAULT_IMAGE)
    except ProviderUnavailable as error:
        return f"no Docker engine can be reached: {error}"
    except DockerError as error:
        return f"the engine has no image {DEFAULT_IMAGE} (Containerfile, target sandbox): {error.message}"
    finally:
        await provider.close()
    return None


@contextlib.asynccontextmanager
async def swept(dsn: str, data: Path, *, docker: bool) -> AsyncIterator[None]:
    """End, after the block, whatever is left of a server's machines. The server must be gone by then."""
    try:
        yield
    finally:
        await asyncio.shield(_sweep(dsn, data, docker=docker))


async def _sweep(dsn: str, data: Path, *, docker: bool) -> None:
    for kept in data.glob("local-machines/machines/*/state/sandbox.json"):
        nowhere = Path()
        await Bubblewrap(kept.parent, workspace=nowhere, tmp=nowhere, etc=nowhere, network=True).destroy()
    if docker:
        await _remove_containers(dsn)


async def _remove_containers(dsn: str) -> None:
    conn: Any = await asyncpg.connect(dsn)
    try:
        installation = await conn.fetchval("select value from installation where name = 'installation_id'")
    finally:
        await conn.close()
    if installation is None:
        return
    provider = DockerProvider()
    try:
        for thing in await provider.owned(installation):
            await provider.discard(thing)
    finally:
        await provider.close()
