"""The running Postgres server of one data directory: find it, start it, wait for it, stop it.

A pid file proves nothing: after a crash its number may belong to any other process, and a server whose omnara was
killed is still alive and well. So the only proof accepted is a connection that answers with this data directory.
Source: coordination §11.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import quote

import asyncpg
import msgspec
import structlog

from omnara.db.embedded.binaries import Binaries, run_as
from omnara.db.embedded.datadir import ROLE, DataDir, child_environment
from omnara.db.embedded.processes import processes_in, works_in
from omnara.errors import ConfigurationError

_log = structlog.get_logger(__name__)

_POLL_S: Final = 0.02
_REPORT_EVERY_S: Final = 10.0
_ORPHAN_LIMIT_S: Final = 15.0
_LOG_LIMIT_BYTES: Final = 10_000_000
_SOCKET_PORT: Final = 5432


class Endpoint(msgspec.Struct, frozen=True):
    """Where a server listens: a socket directory or a loopback address, and the port that names either."""

    host: str
    port: int

    def dsn(self, password: str, database: str) -> str:
        """Return the URL of a database. Holds the password: never log it."""
        credentials = f"{ROLE}:{quote(password, safe='')}"
        if self.host.startswith("/"):
            return f"postgresql://{credentials}@/{database}?host={quote(self.host, safe='')}&port={self.port}"
        return f"postgresql://{credentials}@{self.host}:{self.port}/{database}?sslmode=disable"


class PidFile(msgspec.Struct, frozen=True):
    """What `postmaster.pid` claims. `endpoint` is None while the server has not opened its sockets."""

    pid: int
    endpoint: Endpoint | None

    @classmethod
    def read(cls, pgdata: Path) -> PidFile | None:
        """Return the file's claims; None when there is no file, and process 0, which nobody is, when it is damaged."""
        try:
            lines = (pgdata / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
            pid = abs(int(lines[0]))
        except (ValueError, IndexError):
            return cls(0, None)
        except OSError:
            return None
        if len(lines) < 6 or not lines[3].strip().isdigit():
            return cls(pid, None)
        port, socket_dir, address = int(lines[3]), lines[4].strip(), lines[5].strip()
        host = address or socket_dir.partition(",")[0].strip()
        return cls(pid, Endpoint(host, port) if host else None)


class Postmaster:
    """Controls the server of one `DataDir`. All methods are for one task; `start` leaves the server running."""

    def __init__(self, data: DataDir, binaries: Binaries, *, tcp: bool, durable: bool, extra: dict[str, str]) -> None:
        self._data = data
        self._binaries = binaries
        self._tcp = tcp
        self._durable = durable
        self._extra = extra
        self._child: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The server's process id once it is started or adopted."""
        return self._pid

    async def adopt(self, deadline: float) -> Endpoint | None:
        """Return the endpoint of a server that already runs on this directory, or None when there is none.

        Waits while such a server is still starting or stopping. A pid file that names a dead or foreign process
        means that there is none. Raises `ConfigurationError` when it neither answers nor ends before `deadline`.
        """
        loop = asyncio.get_running_loop()
        while (claim := PidFile.read(self._data.pgdata)) is not None:
            if claim.endpoint is not None and await self._answers(claim.endpoint):
                self._pid = claim.pid
                return claim.endpoint
            if not works_in(claim.pid, self._data.pgdata):
                return None
            if loop.time() > deadline:
                raise ConfigurationError(f"process {claim.pid} runs on {self._data.root} but does not answer")
            await asyncio.sleep(_POLL_S)
        return None

    async def launch(self, deadline: float) -> Endpoint:
        """Start the server in a session of its own and wait until it answers; recovery may take as long as it needs.

        Call it after `adopt` found nobody. Its own session keeps it out of a `kill -9` of our process group. Raises
        `ConfigurationError` with a line of its log when it exits, or when `deadline` (loop time) passes.
        """
        await self._clear_away()
        endpoint = self._choose_endpoint()
        command = [self._binaries.program("postgres"), "-D", str(self._data.pgdata)]
        for name, value in self._settings(endpoint).items():
            command += ["-c", f"{name}={value}"]
        self._child = await asyncio.to_thread(self._spawn, command)
        self._pid = self._child.pid
        await self._until_answering(endpoint, deadline)
        return endpoint

    async def stop(self, *, fast_s: float = 60.0) -> None:
        """Stop in order (clients are cut, a checkpoint is written); after `fast_s` seconds without one.

        Does nothing when there is no server. Returns only once the process is gone.
        """
        pid = self._pid
        if pid is None:
            return
        for number, limit_s in ((signal.SIGINT, fast_s), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            if not self._alive(pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if await self._gone(pid, limit_s):
                break
            _log.warning("embedded postgres does not stop", pid=pid, signal=number.name, waited_s=limit_s)
        self._child = None
        self._pid = None

    def let_go(self) -> None:
        """Forget the server and leave it running; when it ends, whoever inherits it collects its exit code."""
        if self._child is not None and self._child.poll() is None:
            # Tells `subprocess` that nobody will wait for this child, which it would otherwise warn about.
            self._child.returncode = 0
        self._child = None
        self._pid = None

    def _settings(self, endpoint: Endpoint) -> dict[str, str]:
        """Settings on the command line, so that an old data directory gets today's. Source: coordination §11.7."""
        on = "on" if self._durable else "off"
        settings = {
            "listen_addresses": endpoint.host if self._tcp else "",
            "port": str(endpoint.port),
            "unix_socket_directories": "" if self._tcp else endpoint.host,
            "unix_socket_permissions": "0700",
            "shared_buffers": "128MB",
            "max_connections": "100",
            "max_wal_size": "1GB",
            "autovacuum_naptime": "10s",
            "max_parallel_workers_per_gather": "0",
            "fsync": on,
            "synchronous_commit": on,
            "full_page_writes": on,
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "%m [%p] ",
            # Statements, their parameters and the details of errors hold what users wrote.
            "log_min_error_statement": "panic",
            "log_parameter_max_length_on_error": "0",
            "log_error_verbosity": "terse",
        }
        return settings | self._extra

    def _choose_endpoint(self) -> Endpoint:
        if not self._tcp:
            return Endpoint(str(self._data.socket_dir()), _SOCKET_PORT)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Endpoint("127.0.0.1", probe.getsockname()[1])

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        log_file = self._data.log_file
        if log_file.exists() and log_file.stat().st_size > _LOG_LIMIT_BYTES:
            log_file.chmod(0o600)
            log_file.replace(log_file.with_suffix(".log.old"))
        with os.fdopen(_private(log_file), "ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=child_environment(),
                start_new_session=True,
                **run_as(self._data.account),
            )

    async def _until_answering(self, endpoint: Endpoint, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        report_at = loop.time() + _REPORT_EVERY_S
        while not await self._answers(endpoint):
            child = self._child
            if child is None or child.poll() is not None:
                raise ConfigurationError(f"the embedded Postgres did not start: {self._last_log_line()}")
            if loop.time() > deadline:
                await self.stop(fast_s=1.0)
                raise ConfigurationError(f"the embedded Postgres did not answer in time: {self._last_log_line()}")
            if loop.time() > report_at:
                report_at = loop.time() + _REPORT_EVERY_S
                _log.info("embedded postgres is still recovering", last=self._last_log_line())
            await asyncio.sleep(_POLL_S)

    async def _answers(self, endpoint: Endpoint) -> bool:
        """Whether a server there takes our password and works on our directory."""
        try:
            conn = await asyncpg.connect(endpoint.dsn(self._data.password(), "postgres"), timeout=5.0)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            return False
        try:
            directory = await conn.fetchval("select current_setting('data_directory')", timeout=5.0)
            return Path(directory).resolve() == self._data.pgdata.resolve()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        finally:
            conn.terminate()

    async def _clear_away(self) -> None:
        """Remove lock files of a dead server, but only once none of its processes is left in the directory.

        Postgres takes any living process with the recorded number for their owner. Removing them earlier could let
        two servers write the same files, which is how data is lost.
        """
        sockets = (path for path in self._data.socket_dir().glob(".s.PGSQL.*")) if not self._tcp else ()
        stale = [path for path in (self._data.pgdata / "postmaster.pid", *sockets) if path.exists()]
        if not stale:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _ORPHAN_LIMIT_S
        while orphans := await asyncio.to_thread(lambda: list(processes_in(self._data.pgdata))):
            if loop.time() > deadline:
                raise ConfigurationError(f"processes {orphans} of a killed Postgres still run on {self._data.root}")
            await asyncio.sleep(_POLL_S)
        for path in stale:
            path.unlink(missing_ok=True)
        _log.info("removed the lock files of a server that is gone", files=[path.name for path in stale])

    def _alive(self, pid: int) -> bool:
        if self._child is not None and self._child.pid == pid:
            return self._child.poll() is None
        return works_in(pid, self._data.pgdata)

    async def _gone(self, pid: int, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while self._alive(pid):
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _last_log_line(self) -> str:
        """The line that says most about this start: its last fatal one, else its last one."""
        try:
            with self._data.log_file.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read(65536).decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return "its log cannot be read"
        fatal = [line for line in lines if "FATAL" in line or "PANIC" in line]
        return (fatal or lines or ["its log is empty"])[-1]


def _private(path: Path) -> int:
    """Open for appending, for the owner alone, also a file that an earlier release made for everybody."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd
