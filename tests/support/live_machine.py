"""A machine that really runs commands: a home in a directory, its runtime, and a channel to the engine of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID, uuid4

from omnara.db.bus import LocalBus
from omnara.engine.deps import Deps
from omnara.engine.machines.register import NewRuntime, register
from omnara.fleet.sessions import Sessions
from omnara.machines.link import LinkClosed, memory_link
from omnara.machines.posix import PosixHome
from omnara.machines.registration import Platform
from omnara.machines.runtime import Runtime


@contextlib.asynccontextmanager
async def live_machine(deps: Deps, bus: LocalBus, machine_id: UUID, folder: Path) -> AsyncIterator[None]:
    """Serve a machine from `folder` for the length of the block."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    home = PosixHome(folder / "state", base_env={"PATH": "/usr/bin:/bin"}, default_cwd=str(folder / "work"))
    instance = uuid4()
    runtime = Runtime(home, instance_id=instance, platform=Platform(os="linux", arch="amd64"))
    sessions = Sessions(deps, bus, uuid4)
    await sessions.start()
    new = NewRuntime(
        machine_id=machine_id,
        token_id=None,
        instance_id=instance,
        version="1.2.3",
        platform=Platform(os="linux", arch="amd64"),
        capacity={},
        claims=await runtime.claims(),
    )
    registered = await register(deps, new)
    await runtime.reconcile(registered.directives)
    ours, theirs = memory_link()
    try:
        async with sessions.channel(machine_id, registered.runtime.id) as channel:
            session = asyncio.create_task(sessions.run(channel, ours))
            serving = asyncio.create_task(_serve(runtime, theirs))
            try:
                yield
            finally:
                await ours.close()
                serving.cancel()
                await asyncio.gather(session, serving, return_exceptions=True)
                await runtime.destroy("test_over")
    finally:
        await home.close()
        await sessions.stop()


async def _serve(runtime: Runtime, link: object) -> None:
    with contextlib.suppress(LinkClosed):
        await runtime.serve(link, 1000)  # type: ignore[arg-type]
