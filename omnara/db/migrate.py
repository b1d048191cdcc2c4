"""Brings a database to this version's schema: forward only, one process at a time, safe to kill at any moment.

Replicas start together, die in the middle and run two releases side by side. So one polled lock covers everything
including the table of migrations, a migration is either wholly recorded or repeated, and an `expand` that a newer
release has made is accepted by an older one. Source: DESIGN §7 (SQL), field report B57.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.failures import is_retryable
from omnara.db.locks import held, lock_key
from omnara.db.sqlfiles import Queries, SqlFileError, split_statements, sql_root
from omnara.errors import ConfigurationError

_SQL: Final = Queries("migrate")
_FILE: Final = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.(?P<phase>expand|contract)\.sql")
_CONCURRENT_INDEX: Final = re.compile(
    r"create\s+(?:unique\s+)?index\s+concurrently\s+(?P<guard>if\s+not\s+exists\s+)?(?P<name>[a-z_][a-z0-9_]*)", re.I
)
_LOCK_TIMEOUT_S: Final = 3.0
_LOCK_TRIES: Final = 20
"""A schema change that waits for a lock makes every later query wait behind it, so it waits briefly and often."""


class MigrationRefused(ConfigurationError):
    """The database and this version do not fit together; the text says which and what to do."""


class Phase(enum.StrEnum):
    """`EXPAND` keeps the previous release working; `CONTRACT` removes what only older releases used."""

    EXPAND = "expand"
    CONTRACT = "contract"


class Migration(msgspec.Struct, frozen=True):
    """One file. `checksum` is SHA-256 of its text with line ends made uniform."""

    version: int
    name: str
    phase: Phase
    text: str
    checksum: str

    @property
    def transactional(self) -> bool:
        """Whether the whole file runs in one transaction; `-- no-transaction` in its first line says no."""
        return not self.text.startswith("-- no-transaction")


class Applied(msgspec.Struct, frozen=True):
    """One row of `schema_migrations`."""

    version: int
    name: str
    phase: Phase
    checksum: str


class Progress(msgspec.Struct, frozen=True):
    """What the migrator is doing, for a terminal or a log. `what` is waiting, applying or applied."""

    what: str
    version: int = 0
    name: str = ""
    done: int = 0
    total: int = 0


class MigrationReport(msgspec.Struct, frozen=True):
    """The outcome: versions applied by this call, the schema's version now, contract steps left for later."""

    applied: tuple[int, ...]
    version: int
    deferred: tuple[int, ...] = ()
    seconds: float = 0.0


def load_migrations(root: Path | None = None) -> tuple[Migration, ...]:
    """Read `sql/migrations`, in order of version.

    Raises `SqlFileError` on an odd file name, a version used twice or left out, and a concurrent index that could
    not be repeated after a crash.
    """
    directory = (sql_root() if root is None else root) / "migrations"
    found: list[Migration] = []
    for path in sorted(directory.glob("*.sql")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise SqlFileError(f"{path.name} is not NNNN_name.expand.sql or NNNN_name.contract.sql")
        text = "\n".join(path.read_text(encoding="utf-8").splitlines()) + "\n"
        checksum = hashlib.sha256(text.encode()).hexdigest()
        found.append(Migration(int(match["version"]), match["name"], Phase(match["phase"]), text, checksum))
    for position, migration in enumerate(found, start=1):
        if migration.version != position:
            raise SqlFileError(f"migration {position:04d} is missing or there twice")
        _check_repeatable(migration)
    return tuple(found)


def _check_repeatable(migration: Migration) -> None:
    for match in _CONCURRENT_INDEX.finditer(migration.text):
        if migration.transactional:
            raise SqlFileError(f"migration {migration.version:04d} builds an index concurrently inside a transaction")
        if match["guard"] is None:
            raise SqlFileError(f"migration {migration.version:04d}: index {match['name']} needs IF NOT EXISTS")


async def migrate(
    settings: ConnectSettings,
    *,
    migrations: tuple[Migration, ...] | None = None,
    include_contract: bool = True,
    lock_timeout_s: float = 600.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> MigrationReport:
    """Apply what is missing, on a direct connection of its own, and return what was done.

    With `include_contract=False` it stops before the first contract step, unless the database is empty: a rolling
    upgrade runs contracts only when no older replica is left. Another process that migrates is waited for, by
    polling, up to `lock_timeout_s` (`TimeoutError`). Raises `MigrationRefused` when the database does not fit, and
    driver errors when it goes away; calling again then repairs. Cancellation rolls the running migration back.
    """
    started = time.monotonic()
    known = load_migrations() if migrations is None else migrations
    report = on_progress if on_progress is not None else _ignore
    conn = await connect(settings, ConnKind.ADMIN)
    try:
        async with held(
            conn,
            lock_key("migrate", settings.search_path),
            timeout_s=lock_timeout_s,
            on_wait=lambda: report(Progress("waiting")),
        ):
            await conn.execute(_SQL["create_table"])
            applied = await _read_applied(conn)
            check_fit(applied, known)
            todo, deferred = _choose(applied, known, include_contract=include_contract)
            for done, migration in enumerate(todo):
                report(Progress("applying", migration.version, migration.name, done, len(todo)))
                await _apply(conn, migration)
                report(Progress("applied", migration.version, migration.name, done + 1, len(todo)))
    finally:
        await _close(conn)
    versions = tuple(migration.version for migration in todo)
    highest = max([*versions, *(row.version for row in applied)], default=0)
    return MigrationReport(versions, highest, deferred, time.monotonic() - started)


async def check_schema(conn: Connection, migrations: tuple[Migration, ...] | None = None) -> tuple[int, ...]:
    """Return the versions that are still missing, without changing anything. Raises `MigrationRefused`."""
    known = load_migrations() if migrations is None else migrations
    applied = await _read_applied(conn) if await conn.fetchval(_SQL["table_exists"]) else []
    check_fit(applied, known)
    have = {row.version for row in applied}
    return tuple(migration.version for migration in known if migration.version not in have)


def check_fit(applied: list[Applied], known: tuple[Migration, ...]) -> None:
    """Raise `MigrationRefused` when a recorded file has changed, one was skipped, or a newer release went too far."""
    by_version = {migration.version: migration for migration in known}
    have = {row.version for row in applied}
    for row in applied:
        ours = by_version.get(row.version)
        if ours is None and row.phase is Phase.CONTRACT:
            raise MigrationRefused(
                f"the database is at version {row.version:04d} ({row.name}), which removes what this release needs; "
                "run a newer omnara"
            )
        if ours is not None and ours.checksum != row.checksum:
            raise MigrationRefused(
                f"migration {row.version:04d} ({row.name}) was applied with another content than this release has; "
                "run the release that applied it, or restore its file"
            )
    gaps = [version for version in by_version if version not in have and version < max(have, default=0)]
    if gaps:
        raise MigrationRefused(f"the database skipped migration {gaps[0]:04d} and cannot go back to it")


def _choose(
    applied: list[Applied], known: tuple[Migration, ...], *, include_contract: bool
) -> tuple[list[Migration], tuple[int, ...]]:
    """Split what is missing into what runs now and what is left for later."""
    have = {row.version for row in applied}
    missing = [migration for migration in known if migration.version not in have]
    if include_contract or not applied:
        return missing, ()
    for position, migration in enumerate(missing):
        if migration.phase is Phase.CONTRACT:
            return missing[:position], tuple(later.version for later in missing[position:])
    return missing, ()


async def _read_applied(conn: Connection) -> list[Applied]:
    rows = await conn.fetch(_SQL["applied"])
    return [Applied(row["version"], row["name"], Phase(row["phase"]), row["checksum"]) for row in rows]


async def _apply(conn: Connection, migration: Migration) -> None:
    if not migration.transactional:
        await _apply_statements(conn, migration)
        return
    for attempt in range(1, _LOCK_TRIES + 1):
        try:
            await _apply_transaction(conn, migration)
        except Exception as exc:
            if attempt == _LOCK_TRIES or not is_retryable(exc):
                raise
        else:
            return
        await asyncio.sleep(min(0.1 * attempt, 1.0))


async def _apply_transaction(conn: Connection, migration: Migration) -> None:
    started = time.monotonic()
    async with conn.transaction(isolation="read_committed"):
        await conn.execute(f"set local lock_timeout = '{_LOCK_TIMEOUT_S:g}s'")
        await conn.execute(migration.text)
        await _record(conn, migration, started)


async def _apply_statements(conn: Connection, migration: Migration) -> None:
    """Run a file statement by statement; what a killed try left half-made is removed first, so it can be repeated."""
    started = time.monotonic()
    indexes = [match["name"].lower() for match in _CONCURRENT_INDEX.finditer(migration.text)]
    for row in await conn.fetch(_SQL["invalid_indexes"], indexes):
        await conn.execute(f"drop index concurrently if exists {row['quoted_name']}")
    for statement in split_statements(migration.text):
        await conn.execute(statement)
    broken = await conn.fetch(_SQL["invalid_indexes"], indexes)
    if broken:
        raise MigrationRefused(f"index {broken[0]['quoted_name']} could not be built; start again to repeat it")
    await _record(conn, migration, started)


async def _record(conn: Connection, migration: Migration, started: float) -> None:
    seconds = time.monotonic() - started
    values = (migration.version, migration.name, migration.phase.value, migration.checksum, seconds)
    await conn.execute(_SQL["record"], *values)


async def _close(conn: Connection) -> None:
    """Close politely; a connection that a cancellation left in the middle of a statement is cut."""
    try:
        await conn.close(timeout=2.0)
    except (TimeoutError, OSError):
        conn.terminate()


def _ignore(_progress: Progress) -> None:
    """Nobody asked for progress."""
