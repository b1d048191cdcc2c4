"""Which database this process uses, and how it comes to be reachable and up to date.

Without a URL an embedded server is started in the data directory (or adopted, when an omnara that was killed left it
running). Commands that only visit use the running server, or start it for the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from omnara.clock import Backoff, Deadline
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.embedded import DirectoryInUse, EmbeddedPostgres, no_database
from omnara.db.failures import CONNECT_ERRORS, as_unavailable
from omnara.db.migrate import Progress, migrate
from omnara.db.pooler import resolve
from omnara.db.selftest import CONNECTIONS_PER_REPLICA
from omnara.db.service import connection_room
from omnara.errors import ConfigurationError, Unavailable
from omnara.log import get_logger
from omnara.settings import Settings

__all__ = [
    "WAIT_FOR_DATABASE_S",
    "bring_up_to_date",
    "check_room",
    "direct_connection",
    "open_database",
    "visit_database",
]

log = get_logger(__name__)

WAIT_FOR_DATABASE_S: Final = 60.0
"""How long a start waits for a database that is not there yet; then it gives up, and whoever started it tries again."""
COMMAND_WAITS_S: Final = 3.0
"""The same for a command, which somebody sits in front of."""
_LOOK_S: Final = 0.1
"""Between looks at a directory that somebody else has: small beside a start of Postgres, which takes a second."""


@contextlib.asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[ConnectSettings]:
    """Own a database for the life of a server: yours, or an embedded one that stops on leaving.

    A command that is using the embedded one at this moment is waited for. Raises ConfigurationError (pooler without a
    direct URL, embedded extra missing, directory in use …) and DatabaseUnavailable when nothing answers for a minute.
    """
    if settings.database_url is not None:
        yield await _external(settings, WAIT_FOR_DATABASE_S)
        return
    log.warning(
        "OMNARA_DATABASE_URL is not set: using an embedded Postgres; back up its directory, or set the variable",
        data_dir=str(settings.data_dir),
    )
    server = EmbeddedPostgres(settings.data_dir, bin_dir=settings.postgres_bin)
    deadline, told = Deadline(WAIT_FOR_DATABASE_S), False
    while not await _started(server, deadline):
        if not told:
            log.warning("waiting for a command that uses the embedded database", data_dir=str(settings.data_dir))
        told = True
        await asyncio.sleep(_LOOK_S)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        log.info("embedded Postgres runs", adopted=server.adopted, pid=server.pid)
        yield ConnectSettings(dsn=server.dsn, embedded=True)


async def _started(server: EmbeddedPostgres, deadline: Deadline) -> bool:
    try:
        await server.start()
    except DirectoryInUse as error:
        if not error.visited or deadline.passed:
            raise
        return False
    return True


@contextlib.asynccontextmanager
async def visit_database(settings: Settings, patience_s: float = COMMAND_WAITS_S) -> AsyncIterator[ConnectSettings]:
    """Use the database for one command, beside whatever server runs on it.

    A server that is starting its embedded database is waited for. Raises as `open_database`, but after `patience_s`,
    and Unavailable for an embedded database that stays out of reach; a directory that does not exist yet is a
    ConfigurationError, not created.
    """
    if settings.database_url is not None:
        yield await _external(settings, patience_s)
        return
    async with contextlib.AsyncExitStack() as stack:
        yield ConnectSettings(dsn=await _embedded_dsn(settings, stack), embedded=True)


async def _embedded_dsn(settings: Settings, stack: contextlib.AsyncExitStack) -> str:
    """Return where the running embedded server is, or that of one which is started and ends with `stack`."""
    deadline, told = Deadline(WAIT_FOR_DATABASE_S), False
    while True:
        running = await EmbeddedPostgres.running_dsn(settings.data_dir)
        if running is not None:
            return running
        if not _was_served(settings.data_dir):
            raise no_database(settings.data_dir)
        server = EmbeddedPostgres(settings.data_dir, bin_dir=settings.postgres_bin, visiting=True)
        try:
            await stack.enter_async_context(server)
        except DirectoryInUse as error:
            if deadline.passed:
                raise Unavailable(
                    f"the embedded database in {settings.data_dir} belongs to another omnara process (pid {error.pid}) "
                    "and does not answer"
                ) from error
            if not told:
                log.warning("waiting for the server that is starting the embedded database", pid=error.pid)
            told = True
        else:
            return server.dsn
        await asyncio.sleep(_LOOK_S)


def _was_served(data_dir: Path) -> bool:
    """Whether a server was ever started here, if only a moment ago: its lock comes before all else."""
    return any((data_dir / name).exists() for name in ("omnara.lock", "postgres-password"))


async def _external(settings: Settings, patience_s: float) -> ConnectSettings:
    assert settings.database_url is not None
    plain = ConnectSettings(dsn=settings.database_url, direct_dsn=settings.database_direct_url)
    deadline = Deadline(patience_s)
    backoff = Backoff(0.1, 2.0)
    while True:
        try:
            return await resolve(plain)
        except CONNECT_ERRORS as error:
            if deadline.passed:
                raise as_unavailable(error, "the database cannot be reached") from error
            log.warning("waiting for the database", error=type(error).__name__)
            await backoff.wait()


@contextlib.asynccontextmanager
async def direct_connection(database: ConnectSettings) -> AsyncIterator[Connection]:
    """A connection of its own for the block, without time limits. Raises DatabaseUnavailable when none can be made."""
    try:
        connection = await connect(database, ConnKind.ADMIN)
    except CONNECT_ERRORS as error:
        raise as_unavailable(error, "the database cannot be reached") from error
    try:
        yield connection
    finally:
        connection.terminate()


async def bring_up_to_date(database: ConnectSettings) -> None:
    """Apply missing migrations; several processes may do so at once. Raises MigrationRefused, DatabaseUnavailable."""

    def tell(progress: Progress) -> None:
        log.info("migration", what=progress.what, version=progress.version, name=progress.name)

    try:
        report = await migrate(database, on_progress=tell)
    except CONNECT_ERRORS as error:
        raise as_unavailable(error, "the database went away during the migration") from error
    log.info("schema is up to date", version=report.version, applied=list(report.applied))


async def check_room(database: ConnectSettings) -> None:
    """Log how many connections this replica takes of how many; raise ConfigurationError when they cannot fit.

    Source: coordination §11.5.
    """
    async with asyncio.timeout(30), direct_connection(database) as connection:
        room = await connection_room(connection)
    free = room.allowed - room.taken + 1  # the asking connection is closed again
    log.info("connections", per_replica=CONNECTIONS_PER_REPLICA, allowed=room.allowed, free=free)
    if free < CONNECTIONS_PER_REPLICA:
        raise ConfigurationError(
            f"Postgres has {free} of {room.allowed} connections left and a replica needs {CONNECTIONS_PER_REPLICA}; "
            "raise max_connections or run fewer replicas"
        )
