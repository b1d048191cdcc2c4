"""The server under attack: a process group of its own, started, killed without mercy, started again, asked to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import aiohttp

import omnara
from omnara.client.errors import ClientError
from omnara.clock import Deadline, monotonic
from omnara.settings import child_environment
from omnara.testing.ports import free_ports

__all__ = ["ServerFailed", "ServerProcess"]

START_LIMIT_S: Final = 90.0
STOP_LIMIT_S: Final = 40.0


class ServerFailed(ClientError):
    """The server process did not come up, or not go down; the message ends with the end of its log."""


class ServerProcess:
    """`omnara serve` with a given environment. One process at a time; every start appends to the same log file."""

    def __init__(self, environment: Mapping[str, str], log_file: Path) -> None:
        port, ops_port = free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self.ops_url = f"http://127.0.0.1:{ops_port}"
        self._environment = child_environment(
            {
                **environment,
                "OMNARA_LISTEN": f"127.0.0.1:{port}",
                "OMNARA_OPS_LISTEN": f"127.0.0.1:{ops_port}",
                # The child runs this very package, not one that happens to lie in the working directory.
                "PYTHONPATH": str(Path(omnara.__file__).parents[1]),
            }
        )
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """The process id, which is also the id of its process group."""
        return None if self._process is None else self._process.pid

    async def start(self) -> float:
        """Start a process and wait until it is ready; return the seconds that took. Raises ServerFailed."""
        begun = monotonic()
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "omnara", "serve"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        await self._until_ready(self._process)
        return monotonic() - begun

    def kill(self) -> None:
        """Send SIGKILL to the whole process group and reap the process. Returns when it is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    async def stop(self) -> int:
        """Ask the process to stop and return its exit code. Raises ServerFailed if it does not stop in time."""
        if self._process is not None:
            self._process.terminate()
        return await self.ended()

    async def ended(self) -> int:
        """Wait until the process has ended and return its exit code. Raises ServerFailed if it does not in time."""
        process = self._process
        if process is None:
            return 0
        deadline = Deadline(STOP_LIMIT_S)
        while process.poll() is None:
            if deadline.passed:
                self.kill()
                raise ServerFailed(f"the server did not stop within {STOP_LIMIT_S:g} s\n{self.log_tail()}")
            await asyncio.sleep(0.02)
        self._process = None
        return process.returncode

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the server's log."""
        try:
            return "\n".join(self._log_file.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    async def ready(self) -> bool:
        """Whether the process says that it takes traffic."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            return await self._answers(session)

    async def _until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = Deadline(START_LIMIT_S)
        timeout = aiohttp.ClientTimeout(total=2)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if process.poll() is not None:
                    raise ServerFailed(f"the server ended with code {process.returncode}\n{self.log_tail()}")
                if await self._answers(session):
                    return
                if deadline.passed:
                    self.kill()
                    raise ServerFailed(f"the server was not ready within {START_LIMIT_S:g} s\n{self.log_tail()}")
                await asyncio.sleep(0.02)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.ops_url}/readyz") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False
