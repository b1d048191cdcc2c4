"""The daemon's loop: who am I, register, serve the socket, and again; and when to stop for good.

Source: machines.md §2 (reactions, backoff), §9 (sleep), §14.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform as host
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

import msgspec

from omnara import __version__
from omnara.clock import Backoff, monotonic
from omnara.log import get_logger
from omnara.machines import wire
from omnara.machines.daemon.client import AuthorityLost, NotAsleep, Refused, ServerAway, ServerClient, Superseded
from omnara.machines.daemon.config import DaemonConfig, Home, Status
from omnara.machines.daemon.sleeping import WAKE_PORT, until_woken
from omnara.machines.link import LinkClosed
from omnara.machines.posix import PosixHome
from omnara.machines.processes import HomeFull, HomeLost
from omnara.machines.runtime import Runtime, Timing
from omnara.machines.runtime.claims import DirectivesRefused

__all__ = ["Daemon", "Knobs", "identify", "observed_platform"]

log = get_logger(__name__)

_END_S: Final = 5.0
_STEADY_S: Final = 5.0
"""A connection that held for so long begins the backoff anew."""


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, for tests to shrink. Source: machines.md §2 (1 s to 30 s), §9 (sleep)."""

    backoff_base_s: float = 1.0
    backoff_cap_s: float = 30.0
    sleep_after_s: float | None = None
    idle_tick_s: float = 1.0
    wake_port: int = WAKE_PORT
    timing: Timing = Timing()


class Daemon:
    """One daemon process's work, after its lock was taken. `run` may be called once."""

    def __init__(
        self,
        home: Home,
        config: DaemonConfig,
        *,
        base_env: Mapping[str, str],
        default_cwd: str,
        knobs: Knobs | None = None,
    ) -> None:
        self._home = home
        self._config = config
        self._knobs = knobs or Knobs()
        self._instance_id = uuid4()
        self._processes = PosixHome(home.state(config) / "home", base_env=base_env, default_cwd=default_cwd)
        self._runtime = Runtime(
            self._processes,
            instance_id=self._instance_id,
            platform=observed_platform(),
            timing=self._knobs.timing,
        )
        self._backoff = Backoff(self._knobs.backoff_base_s, self._knobs.backoff_cap_s)
        self._runtime_id: str | None = None
        self._may_sleep = self._knobs.sleep_after_s is not None

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` or until the server has no use for this daemon; return the exit code.

        0 after authority was lost (everything local is gone then), after a newer daemon took over, and after `stop`
        (commands run on in both); 1 when the server refuses what this daemon sends.
        """
        async with ServerClient(self._config.api_url, self._config.machine_token) as client:
            serving = asyncio.ensure_future(self._serve(client))
            stopping = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    return serving.result()
                self._say("stopping")
                serving.cancel()
                await asyncio.wait((serving,))
                await self._end(client)
                return 0
            finally:
                serving.cancel()
                stopping.cancel()
                await asyncio.gather(serving, stopping, return_exceptions=True)
                await self._runtime.close()
                await self._processes.close()

    async def _serve(self, client: ServerClient) -> int:
        while True:
            began = monotonic()
            try:
                if await self._connection(client):
                    return await self._destroy()
                self._backoff.reset()
            except AuthorityLost as error:
                log.error("the server does not know this machine any more", error=str(error))
                return await self._destroy()
            except Superseded as error:
                log.warning("another daemon has this machine now; commands run on", error=str(error))
                return 0
            except Refused as error:
                log.error("the server refuses what this daemon sends", error=str(error))
                return 1
            except (ServerAway, HomeLost, HomeFull, DirectivesRefused) as error:
                await self._wait(began, str(error), getattr(error, "retry_after_s", 0.0))
            except LinkClosed as error:
                await self._wait(began, f"the connection ended: {error}", 0.0)

    async def _wait(self, began: float, why: str, retry_after_s: float) -> None:
        if monotonic() - began >= _STEADY_S:
            self._backoff.reset()
        wait_s = self._backoff.next_s() + retry_after_s
        log.warning("not connected", why=why, next_try_s=round(wait_s, 1))
        self._say("not connected", why)
        await asyncio.sleep(wait_s)

    async def _connection(self, client: ServerClient) -> bool:
        """Register, serve one socket; True when the server said that nothing here is to be kept.

        Raises what the client raises, LinkClosed, HomeLost, DirectivesRefused.
        """
        request = wire.RegisterRequest(
            daemon_instance_id=str(self._instance_id),
            daemon_version=__version__,
            observed_platform=observed_platform(),
            capacity={"cpu": os.cpu_count() or 1},
            processes=await self._runtime.claims(),
        )
        registered = await client.register(request)
        self._runtime_id = registered.runtime.id
        await self._runtime.reconcile(registered.reconciliation.processes)
        try:
            link = await client.connect(registered.runtime.id)
        except Superseded as error:
            raise ServerAway(str(error)) from error  # at the socket it only means: register again
        self._say("connected")
        log.info("connected", server=self._config.api_url, machine_id=self._config.machine_id)
        serving = asyncio.ensure_future(self._runtime.serve(link, registered.runtime.next_heartbeat_after_ms))
        idle = asyncio.ensure_future(self._idle())
        try:
            await asyncio.wait((serving, idle), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                ended = serving.result()
                log.warning("the server ended this runtime", code=ended.code)
                if ended.authority_lost:
                    return True
                raise ServerAway(f"the server ended this runtime: {ended.code}")
        finally:
            for one in (serving, idle):
                one.cancel()
            await asyncio.gather(serving, idle, return_exceptions=True)
        await self._sleep(client, registered.runtime.id)
        return False

    # --- sleeping, ending -----------------------------------------------------------------------------------

    async def _idle(self) -> None:
        """Return when nothing was to be done for as long as it takes to sleep; never when this machine does not."""
        after_s = self._knobs.sleep_after_s
        if after_s is None or not self._may_sleep:
            await asyncio.Event().wait()
            return
        since = monotonic()
        while monotonic() - since < after_s:
            await asyncio.sleep(self._knobs.idle_tick_s)
            if self._runtime.busy:
                since = monotonic()

    async def _sleep(self, client: ServerClient, runtime_id: str) -> None:
        try:
            await client.sleep(runtime_id)
        except NotAsleep as error:
            self._may_sleep = not error.forever
            return
        except Superseded:
            return  # the runtime ended meanwhile; the registration tells whether there is a newer one
        self._say("asleep")
        log.info("this machine may sleep")
        woken = await until_woken(self._knobs.wake_port)
        log.info("awake", by=woken)

    async def _end(self, client: ServerClient) -> None:
        """Tell the server that this runtime is over, so that it need not wait for its lease; at most for a moment."""
        if self._runtime_id is None:
            return
        with contextlib.suppress(AuthorityLost, Superseded, Refused, ServerAway, NotAsleep, TimeoutError):
            async with asyncio.timeout(_END_S):
                await client.end(self._runtime_id)

    async def destroy(self) -> int:
        """Instead of `run`: end all that runs and delete all that is kept. Returns the exit code."""
        try:
            return await self._destroy()
        finally:
            await self._processes.close()

    async def _destroy(self) -> int:
        """Whoever owned this machine does not any more: nothing of it stays."""
        self._say("ending")
        with contextlib.suppress(HomeLost):
            await self._runtime.destroy("authorization_revoked")
        await asyncio.to_thread(self._home.wipe, self._config)
        return 0

    def _say(self, state: str, detail: str = "") -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._home.say(Status(pid=os.getpid(), state=state, since=now, detail=detail[:500]))


async def identify(
    api_url: str, token: str, *, knobs: Knobs | None = None, patient: bool = True
) -> wire.BootstrapResponse:
    """Ask the server which machine the token stands for; `patient`: again and again while it is away.

    Raises AuthorityLost, Refused, Superseded; ServerAway unless patient.
    """
    times = knobs or Knobs()
    backoff = Backoff(times.backoff_base_s, times.backoff_cap_s)
    async with ServerClient(api_url, token) as client:
        while True:
            try:
                return await client.bootstrap()
            except ServerAway as error:
                if not patient:
                    raise
                wait_s = backoff.next_s() + error.retry_after_s
                log.warning("the server cannot be reached", why=str(error), next_try_s=round(wait_s, 1))
                await asyncio.sleep(wait_s)


def observed_platform() -> wire.Platform:
    """Return this computer's operating system and processor in the words that machines are described with."""
    machine = host.machine().lower()
    arch: dict[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
    return wire.Platform(os=sys.platform, arch=arch.get(machine, machine))
