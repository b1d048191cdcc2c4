"""A real PgBouncer in front of the test's Postgres: what the small pooler of the other module imitates.

Debian's package `pgbouncer` has the program. In CI its absence is a failure; elsewhere the test is skipped and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from bench.processes import die_with_parent
from tests.support.waiting import until

NOBODY = 65534
"""PgBouncer refuses to run as root."""


def program() -> str:
    """The path of `pgbouncer`. Skips the test when it is not installed, unless this is CI: it fails there."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        why = "pgbouncer is not installed (Debian's package is called pgbouncer)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


class PgBouncer:
    """One process, in transaction mode unless said otherwise; `dsn` leads through it to the same database."""

    def __init__(self, dsn: str, directory: Path, **settings: object) -> None:
        self._target = urlsplit(dsn)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._log = directory / "log"
        self.port = _free_port()
        self._settings: dict[str, object] = {"pool_mode": "transaction", "default_pool_size": 4} | settings
        login = self._target.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(self._target._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    async def start(self) -> None:
        """Start it on its port and wait until it answers; again after `kill`, too."""
        config = self._directory / "pgbouncer.ini"
        config.write_text(self._config())
        user = NOBODY if os.geteuid() == 0 else None
        for path in (self._directory, config):
            path.chmod(0o755)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                program(), str(config), stdout=log, stderr=log, preexec_fn=die_with_parent, user=user, group=user
            )
        await until(self._answers, "PgBouncer answers", limit_s=20)

    async def kill(self) -> None:
        """`kill -9`; its connections to both sides end."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, self._log.read_text()
        try:
            conn = await asyncpg.connect(self.dsn, statement_cache_size=0, timeout=5)
        except (OSError, asyncpg.PostgresError):
            return False
        conn.terminate()
        return True

    def _config(self) -> str:
        target = self._target
        login = f"user={target.username}" + ("" if target.password is None else f" password={target.password}")
        lines = [
            "[databases]",
            f"* = host={target.hostname} port={target.port} {login}",
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = any",
            *(f"{name} = {value}" for name, value in self._settings.items()),
        ]
        return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def pgbouncer(dsn: str, **settings: object) -> AsyncIterator[PgBouncer]:
    """Run PgBouncer for the block, with these settings beside or instead of ours."""
    program()
    directory = Path(tempfile.mkdtemp(prefix="omnara-pgbouncer-"))
    bouncer = PgBouncer(dsn, directory, **settings)
    try:
        await bouncer.start()
        yield bouncer
    finally:
        if bouncer._process is not None:
            await bouncer.kill()
        shutil.rmtree(directory)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
