"""A real Postgres for tests: one server shared by all test processes, one fresh database per test.

The server is the embedded one, or Debian's programs when `OMNARA_TEST_PG_BIN` names their directory, or any server at
`OMNARA_TEST_DATABASE_URL` (its role must be allowed to create databases). Its directory is kept between runs, so a run
pays for initdb once; whoever leaves last stops it. fsync is off unless `OMNARA_TEST_FSYNC=1`; without it the directory
is in memory where there is plenty: a database of a test's own is some three hundred files, made and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psutil

from omnara.db import migrate as migrate_module
from omnara.db.connection import ConnectSettings
from omnara.db.embedded import EmbeddedPostgres
from omnara.db.migrate import load_migrations, migrate

_counter = itertools.count(1)
_ROOM = 4 * 2**30
"""Bytes. The suite takes some hundreds of megabytes."""


class PostgresForTests:
    """A reachable server. `fresh` and `empty` make databases that end with the test."""

    def __init__(self, admin_dsn: str) -> None:
        self.admin_dsn = admin_dsn
        self._template: str | None = None

    def dsn(self, database: str) -> str:
        """The URL of another database of this server."""
        parts = urlsplit(self.admin_dsn)
        return urlunsplit(parts._replace(path=f"/{database}"))

    @contextlib.asynccontextmanager
    async def empty(self) -> AsyncIterator[str]:
        """A database without any table; yields its URL."""
        async with self._database(None) as dsn:
            yield dsn

    @contextlib.asynccontextmanager
    async def fresh(self) -> AsyncIterator[str]:
        """A database with this checkout's schema, copied from a template; yields its URL."""
        async with self._database(await self.template()) as dsn:
            yield dsn

    async def template(self) -> str:
        """Return the template with this checkout's schema, migrating it if no test process has done so yet."""
        if self._template is None:
            text = "".join(migration.checksum for migration in load_migrations())
            text += Path(migrate_module.__file__).read_text(encoding="utf-8")
            name = f"tmpl_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            await self._make_template(name)
            self._template = name
        return self._template

    async def drop_leftovers(self) -> None:
        """Drop databases of test processes that are gone. Templates of other checkouts go when they are 20."""
        conn = await asyncpg.connect(self.admin_dsn)
        try:
            names = [
                row["datname"]
                for row in await conn.fetch(
                    "select datname from pg_database where datname ~ '^(t_[0-9]+_|tmpl_)' order by oid"
                )
            ]
            dead = [name for name in names if name.startswith("t_") and not psutil.pid_exists(int(name.split("_")[1]))]
            for name in dead + [name for name in names if name.startswith("tmpl_")][:-20]:
                with contextlib.suppress(asyncpg.ObjectInUseError, asyncpg.InvalidCatalogNameError):
                    await _drop(conn, name)
        finally:
            await conn.close()

    async def _make_template(self, name: str) -> None:
        conn = await asyncpg.connect(self.admin_dsn)
        try:
            with _file_lock("template"):
                found = await conn.fetchval("select not datallowconn from pg_database where datname = $1", name)
                if found:
                    return
                if found is False:
                    await conn.execute(f"drop database {name} with (force)")
                await conn.execute(f"create database {name} template template0")
                await migrate(ConnectSettings(dsn=self.dsn(name)))
                await conn.execute(f"alter database {name} allow_connections false")
        finally:
            await conn.close()

    @contextlib.asynccontextmanager
    async def _database(self, template: str | None) -> AsyncIterator[str]:
        name = f"t_{os.getpid()}_{next(_counter)}"
        conn = await asyncpg.connect(self.admin_dsn)
        try:
            await conn.execute(f"create database {name} template {template or 'template0'} strategy file_copy")
        finally:
            await conn.close()
        try:
            yield self.dsn(name)
        finally:
            conn = await asyncpg.connect(self.admin_dsn)
            try:
                await _drop(conn, name)
            finally:
                await conn.close()


async def _drop(conn: asyncpg.Connection, name: str) -> None:
    if name.startswith("tmpl_"):
        await conn.execute(f"alter database {name} allow_connections true")
    await conn.execute(f"drop database if exists {name} with (force)")


@contextlib.asynccontextmanager
async def postgres_for_tests() -> AsyncIterator[PostgresForTests]:
    """Attach to the shared server, starting it when this is the only test process; stop it when leaving last."""
    url = os.environ.get("OMNARA_TEST_DATABASE_URL")
    if url:
        yield PostgresForTests(url)
        return
    server = _shared_server()
    with _file_lock("users"):
        first = _join()
        await server.start()
        admin = PostgresForTests(server.dsn)
        server.detach()
        if first:
            await admin.drop_leftovers()
    try:
        yield admin
    finally:
        with _file_lock("users"):
            if _leave():
                await server.start()
                await server.stop()


def _shared_server() -> EmbeddedPostgres:
    bin_dir = os.environ.get("OMNARA_TEST_PG_BIN")
    return EmbeddedPostgres(
        _base() / "data",
        bin_dir=Path(bin_dir) if bin_dir else None,
        tcp=True,
        durable=_fsync(),
        extra_settings={
            "max_connections": "400",
            "shared_buffers": "64MB",
            "autovacuum_naptime": "60s",
            "max_wal_size": "256MB",
        },
    )


def _fsync() -> bool:
    return os.environ.get("OMNARA_TEST_FSYNC") == "1"


def _base() -> Path:
    kind = hashlib.sha256(f"{os.environ.get('OMNARA_TEST_PG_BIN', '')}|{_fsync()}".encode()).hexdigest()[:8]
    base = _place() / f"omnara-tests-{os.geteuid()}-{kind}"
    base.mkdir(mode=0o711, exist_ok=True)
    return base


def _place() -> Path:
    """Memory, if half of what it may take leaves enough for everybody else; the same for every process of a run."""
    memory = Path("/dev/shm")
    if _fsync() or not memory.is_dir() or not os.access(memory, os.W_OK):
        return Path(tempfile.gettempdir())
    size = shutil.disk_usage(memory).total
    return memory if size >= _ROOM and psutil.virtual_memory().total >= 2 * _ROOM else Path(tempfile.gettempdir())


@contextlib.contextmanager
def _file_lock(name: str) -> Iterator[None]:
    with (_base() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _users() -> set[int]:
    path = _base() / "users"
    pids = path.read_text().split() if path.exists() else []
    return {int(pid) for pid in pids if psutil.pid_exists(int(pid))}


def _join() -> bool:
    """Enter this process in the list of users; true when it is the only one."""
    others = _users() - {os.getpid()}
    (_base() / "users").write_text(" ".join(str(pid) for pid in others | {os.getpid()}))
    return not others


def _leave() -> bool:
    """Strike this process off the list; true when nobody is left."""
    others = _users() - {os.getpid()}
    (_base() / "users").write_text(" ".join(str(pid) for pid in others))
    return not others
