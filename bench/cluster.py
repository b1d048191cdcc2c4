"""The Postgres that is measured: an embedded one with every durability setting on, or one that was named.

A bench without fsync measures nothing, so the settings are read back from the server and a run is refused when one of
them is off. Databases are made for the run and dropped after it. Source: DESIGN §9.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec

from bench.processes import start_child, work_directory
from omnara.db.connection import ConnectSettings
from omnara.db.embedded import EmbeddedPostgres
from omnara.db.migrate import migrate

__all__ = ["Cluster", "Database", "NotDurable", "open_cluster"]

DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")
SHOWN: Final = (
    *DURABLE,
    "shared_buffers",
    "max_wal_size",
    "wal_level",
    "checkpoint_timeout",
    "autovacuum_naptime",
    "max_connections",
)
MAX_CONNECTIONS: Final = 200
"""Four replicas with nine connections, the bare loop's twelve, a peer's pool, and room."""


class NotDurable(Exception):
    """The server would lose acknowledged commits: a rate measured on it says nothing."""


class Database(msgspec.Struct, frozen=True):
    """A migrated database of the run. `dsn` may hold a password: never show it."""

    dsn: str
    embedded: bool

    @property
    def settings(self) -> ConnectSettings:
        """How the engine reaches it."""
        return ConnectSettings(dsn=self.dsn, embedded=self.embedded)


class Cluster:
    """A reachable server whose role may create databases."""

    def __init__(self, admin_dsn: str, *, embedded: bool) -> None:
        self._admin_dsn = admin_dsn
        self._embedded = embedded
        self.facts: Mapping[str, str] = {}

    def dsn(self, database: str) -> str:
        """The URL of another database of this server."""
        return urlunsplit(urlsplit(self._admin_dsn)._replace(path=f"/{database}"))

    async def read_facts(self) -> None:
        """Read version and settings back. Raises NotDurable when acknowledged commits could be lost."""
        conn = await asyncpg.connect(self._admin_dsn)
        try:
            facts = {"version": str(await conn.fetchval("show server_version")).split(" ")[0]}
            for name in SHOWN:
                facts[name] = str(await conn.fetchval("select current_setting($1)", name))
        finally:
            await conn.close()
        off = [name for name in DURABLE if facts[name] != "on"]
        if off:
            raise NotDurable(f"{', '.join(off)} must be on for a bench; switch it on, or name another server")
        self.facts = facts

    @contextlib.asynccontextmanager
    async def database(self, name: str, *, migrated: bool = True) -> AsyncIterator[Database]:
        """A database of this run, with the whole schema if `migrated`; dropped afterwards, whoever is still in it."""
        full = f"omnara_bench_{os.getpid()}_{name}"
        await self._admin(f"create database {full} template template0")
        try:
            found = Database(self.dsn(full), self._embedded)
            if migrated:
                await migrate(found.settings)
            yield found
        finally:
            await asyncio.shield(self._admin(f"drop database if exists {full} with (force)"))

    async def _admin(self, statement: str) -> None:
        conn = await asyncpg.connect(self._admin_dsn)
        try:
            await conn.execute(statement)
        finally:
            await conn.close()


@contextlib.asynccontextmanager
async def open_cluster(database_url: str | None) -> AsyncIterator[Cluster]:
    """Use the named server, or start an embedded one that is stopped and removed afterwards.

    Raises NotDurable, and what an embedded server raises when it cannot start.
    """
    if database_url is not None:
        named = Cluster(database_url, embedded=False)
        await named.read_facts()
        yield named
        return
    async with _directory() as path, work_directory() as logs:
        extra = {"max_connections": str(MAX_CONNECTIONS)}
        async with start_child("guard", logs, outlives=True, path=str(path)) as guard:
            async with EmbeddedPostgres(path, tcp=True, extra_settings=extra) as server:
                own = Cluster(server.dsn_for("postgres"), embedded=True)
                await own.read_facts()
                yield own
            await guard.ask("release")


@contextlib.asynccontextmanager
async def _directory() -> AsyncIterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="omnara-bench-"))
    try:
        yield path
    finally:
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
