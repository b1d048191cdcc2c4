"""`omnara serve` as it is shipped, as processes that a scenario may kill; everything is seen from outside of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp

from bench.cluster import Database
from bench.processes import ChildFailed, Process
from omnara.testing.ports import free_ports
from omnara.vault import KeyRing

__all__ = ["Server", "server_environment"]

READY_LIMIT_S: Final = 90.0
READY_EVERY_S: Final = 0.005


def server_environment(database: Database, ring: KeyRing, key: str, model_url: str) -> dict[str, str]:
    """The settings of a replica with the scripted model as provider `openai`; everything else has its default."""
    return {
        "OMNARA_DATABASE_URL": database.dsn,
        "OMNARA_SECRET_ENCRYPTION_KEYS": ring.serialise(),
        "OMNARA_SECRET_ENCRYPTION_ACTIVE_KEY": ring.active,
        "OMNARA_BOOTSTRAP_API_KEY": key,
        "OMNARA_ALLOWED_PRIVATE_HOSTS": model_url.removeprefix("http://"),
        "OMNARA_LOG_FORMAT": "json",
        "OPENAI_API_KEY": "sk-bench",
        "OPENAI_BASE_URL": f"{model_url}/v1",
    }


class Server:
    """One replica on ports of its own, which it keeps over restarts."""

    def __init__(self, name: str, environment: Mapping[str, str], directory: Path) -> None:
        port, ops_port = free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self._ready_url = f"http://127.0.0.1:{ops_port}/readyz"
        listen = {"OMNARA_LISTEN": f"127.0.0.1:{port}", "OMNARA_OPS_LISTEN": f"127.0.0.1:{ops_port}"}
        self._process = Process(
            [sys.executable, "-m", "omnara", "serve"], {**environment, **listen}, directory / f"serve-{name}.log"
        )
        self.name = name

    async def start(self) -> float:
        """Start the process, wait until it says that it is ready; return the Unix time of that. Raises ChildFailed."""
        await self._process.start()
        deadline = time.monotonic() + READY_LIMIT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while not await self._ready(session):
                if not self._process.running:
                    raise ChildFailed(f"server {self.name} ended\n{self._process.log_tail()}")
                if time.monotonic() > deadline:
                    raise ChildFailed(f"server {self.name} is not ready\n{self._process.log_tail()}")
                await asyncio.sleep(READY_EVERY_S)
        return time.time()

    @property
    def pid(self) -> int:
        """Its process id, to see what it uses. Raises RuntimeError when it was not started."""
        return self._process.pid

    async def kill(self) -> float:
        """Send SIGKILL to its process group; return the Unix time just before."""
        at = time.time()
        await self._process.kill()
        return at

    async def stop(self) -> int:
        """Send SIGTERM and wait for the end of the drain; return the exit code."""
        return await self._process.stop()

    def log_tail(self) -> str:
        """The last lines of its log."""
        return self._process.log_tail()

    async def _ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self._ready_url) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False
