"""Real server processes under test: started, watched through their probes, stopped, frozen, killed.

Each runs in a process group of its own with nothing of the operator's settings, writes its log to a file and the named
points that it reaches to a pipe, so a test knows where a process is instead of guessing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import msgspec
import psutil

from omnara.settings import child_environment
from omnara.testing.ports import free_ports
from tests.support.waiting import until

START_LIMIT_S = 60.0
COMMAND = [sys.executable, "-m", "omnara", "serve"]
TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])"""
"""Asks Linux to kill the process with the test run, then becomes the server: a killed run leaves nothing behind."""
ROOT = Path(__file__).parents[2]


class ProbePipe:
    """The reading end of a process's probe pipe. Every point since the start is kept."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        # Also opened for writing, so that the pipe has no end while no process writes to it.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self._changed = asyncio.Event()
        self.points: list[dict[str, Any]] = []
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        """Stop reading."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.path.unlink()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.points.extend(msgspec.json.decode(line) for line in lines)
        self._changed.set()

    async def wait(self, name: str, *, after: int = 0, within_s: float = 20.0, **fields: Any) -> dict[str, Any]:
        """Return the first point `name` with these fields, from position `after` on, now or when it is reached."""
        wanted = {"point": name} | {
            key: str(value) if isinstance(value, UUID) else value for key, value in fields.items()
        }
        try:
            async with asyncio.timeout(within_s):
                while True:
                    self._changed.clear()
                    for point in self.points[after:]:
                        if wanted.items() <= point.items():
                            return point
                    after = len(self.points)
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"{wanted} not within {within_s} s; last: {self.points[-5:]}") from None


class ServerProcess:
    """`python -m omnara serve` with a given environment. One process; a restart is another `ServerProcess`."""

    def __init__(
        self, name: str, directory: Path, environment: Mapping[str, str], *, ports: tuple[int, int] | None = None
    ):
        self.name = name
        self.ports = free_ports() if ports is None else ports
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.ops_url = f"http://127.0.0.1:{self.ports[1]}"
        self.log_file = directory / f"{name}.log"
        self.probes = ProbePipe(directory / f"{name}.probes")
        self._environment = child_environment(
            {
                "OMNARA_LISTEN": f"127.0.0.1:{self.ports[0]}",
                "OMNARA_OPS_LISTEN": f"127.0.0.1:{self.ports[1]}",
                "OMNARA_LOG_FORMAT": "json",
                "OMNARA_DOCKER_HOST": "off",
                "OMNARA_LOCAL_MACHINES": "off",
                "OMNARA_TEST_PROBES": str(self.probes.path),
                "PYTHONPATH": str(ROOT),
                **environment,
            }
        )
        self._process: subprocess.Popen[bytes] | None = None

    # --- life -------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process and return at once."""
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-SEc", TIED, *COMMAND] if sys.platform == "linux" else COMMAND,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def start(self) -> float:
        """Start the process and wait until it is ready; the seconds that took."""
        self.launch()
        return await self.ready()

    async def ready(self, *, limit_s: float = START_LIMIT_S) -> float:
        """Wait until the process says that it is ready; the seconds that took. Fails when it ends first."""

        def there() -> bool:
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.log_tail()}"
            return any(point["point"] == "ready" for point in self.probes.points)

        return await until(there, f"{self.name} is ready\n{self.log_tail()}", limit_s=limit_s)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone, not to its group."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the whole group without mercy, and reap it. May be repeated."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def local_ports(self, remote: int) -> list[int]:
        """The ports from which the main process has connected to a port, and to no other.

        Connections to different places may share a port, also with those of other processes.
        """
        found = psutil.Process(self.pid).net_connections()
        return [each.laddr.port for each in found if each.raddr and each.raddr.port == remote]

    def kill_main(self) -> None:
        """`kill -9` of the process itself; what it started is left to end by its own means."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    async def exited(self, *, limit_s: float = 30.0) -> int:
        """Wait until the process has ended by itself; its exit code."""
        await until(lambda: self.process.poll() is not None, f"{self.name} ends\n{self.log_tail()}", limit_s=limit_s)
        return int(self.process.returncode)

    async def stop(self, *, limit_s: float = 40.0) -> int:
        """SIGTERM, and wait; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.exited(limit_s=limit_s)

    # --- looking at it ----------------------------------------------------------------------------------

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running or ended process."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def pid(self) -> int:
        """The process id, which is its group's too."""
        return self.process.pid

    @property
    def started(self) -> bool:
        """Whether it was ever started."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether it runs (a stopped one does)."""
        return self._process is not None and self._process.poll() is None

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """The log lines of one event so far."""
        return [line for line in self._log() if line.get("event") == event]

    def warnings(self) -> list[str]:
        """What it has warned of so far, as it was written."""
        levels = ("info", "debug")
        return [msgspec.json.encode(line).decode() for line in self._log() if line.get("level") not in levels]

    @property
    def worker_id(self) -> UUID:
        """The identity that the process has registered last."""
        return UUID(self.log_lines("worker_registered")[-1]["worker_id"])

    def is_worker(self, worker_id: UUID) -> bool:
        """Whether this identity is, or was, one of this process."""
        return any(line["worker_id"] == str(worker_id) for line in self.log_lines("worker_registered"))

    def log_tail(self, lines: int = 12) -> str:
        """The end of its log."""
        if not self.log_file.exists():
            return "(no log)"
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def tracebacks(self) -> list[str]:
        """Unexpected errors that it has logged."""
        return [str(line["exception"]) for line in self._log() if line.get("exception")]

    async def readyz(self) -> int:
        """The status of /readyz; 0 when nobody answers."""
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.ops_url}/readyz") as response,
            ):
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return 0

    def _log(self) -> Iterator[dict[str, Any]]:
        if not self.log_file.exists():
            return
        for line in self.log_file.read_text(errors="replace").splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=dict[str, Any])


def left_behind(servers: Sequence[ServerProcess]) -> list[int]:
    """Ids of processes that are left in the groups of these servers, without those that wait to be reaped."""
    groups = {server.pid for server in servers if server.started}
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.info["pid"]) in groups:
                found.append(process.info["pid"])
    return found


async def first_at(servers: Sequence[ServerProcess], name: str, **fields: Any) -> ServerProcess:
    """Return the process that reaches this point first, from now on."""
    waits = {
        asyncio.create_task(server.probes.wait(name, after=len(server.probes.points), **fields)): server
        for server in servers
    }
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    first = done.pop()
    first.result()
    return waits[first]
