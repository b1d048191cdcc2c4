"""Finds out whether a URL leads through a transaction pooler, and what that means for the settings.

Behind such a pooler session locks stay with a server connection after their owner is gone and LISTEN hears nothing,
mostly without any error. A test with one connection passes there, so this one uses two. Source: coordination §11.4.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import asyncpg
import msgspec

from omnara.db.connection import ConnectSettings, ConnKind
from omnara.errors import ConfigurationError

_PID: Final = "select pg_backend_pid()"
_TRY_LOCK: Final = "select pg_try_advisory_xact_lock($1)"
_NO_TRANSACTIONS: Final = "transaction blocks not allowed"
"""What PgBouncer says in statement mode to the first transaction; plain statements work until then."""
_ROUNDS: Final = 3
"""One round can be fooled: by other clients that take and give back server connections between two of its looks."""

if TYPE_CHECKING:
    _Plain = asyncpg.Connection[asyncpg.Record]


async def is_transaction_pooler(dsn: str, *, variable: str = "the URL", timeout_s: float = 5.0) -> bool:
    """Whether two client connections of `dsn` share server connections: a, then a transaction on b, then a again.

    Opens and closes two connections. Raises `ConfigurationError` about `variable` when a pooler in statement mode
    answers, and what the driver raises when the server is away.
    """
    first = await _connect(dsn, timeout_s)
    try:
        second = await _connect(dsn, timeout_s)
        try:
            for _ in range(_ROUNDS):
                if await _share(first, second):
                    return True
            return False
        except asyncpg.PostgresError as error:
            # It ends the connection, so the driver's error is the one of a lost connection, which would be tried again.
            if _NO_TRANSACTIONS not in str(error):
                raise
            raise ConfigurationError(
                f"{variable} leads through a pooler in statement mode, which allows no transactions; "
                "set the pooler to transaction mode, or use a URL that reaches Postgres itself"
            ) from error
        finally:
            second.terminate()
    finally:
        first.terminate()


async def resolve(settings: ConnectSettings) -> ConnectSettings:
    """Return `settings` with `pooled` set to what is found; call once at start, before any other connection.

    Raises `ConfigurationError` when the only URL leads through a pooler, when the direct URL does too or leads to
    another database, and when a pooler in statement mode is found.
    """
    timeout_s = settings.connect_timeout_s
    pooled = await is_transaction_pooler(settings.dsn, variable="OMNARA_DATABASE_URL", timeout_s=timeout_s)
    if settings.direct_dsn is not None:
        variable = "OMNARA_DATABASE_DIRECT_URL"
        if await is_transaction_pooler(settings.direct_dsn, variable=variable, timeout_s=timeout_s):
            raise ConfigurationError(
                "OMNARA_DATABASE_DIRECT_URL leads through a transaction pooler; it must reach Postgres itself"
            )
        if not await _same_database(settings.dsn, settings.direct_dsn, timeout_s):
            raise ConfigurationError(
                "OMNARA_DATABASE_DIRECT_URL and OMNARA_DATABASE_URL lead to different databases; "
                "they must reach the same one"
            )
        # A pooler in session mode shares nothing, but takes no settings either: what works through any works there.
        pooled = pooled or await _refuses_settings(settings, ConnKind.API)
    elif pooled:
        raise ConfigurationError(
            "OMNARA_DATABASE_URL leads through a transaction pooler, where locks and LISTEN do not work; "
            "set OMNARA_DATABASE_DIRECT_URL to a URL that reaches Postgres itself"
        )
    if await _refuses_settings(settings, ConnKind.SESSION):
        raise ConfigurationError(
            "what answers refuses the settings of a session, as a pooler does; "
            "set OMNARA_DATABASE_DIRECT_URL to a URL that reaches Postgres itself"
        )
    return msgspec.structs.replace(settings, pooled=pooled)


async def _share(first: _Plain, second: _Plain) -> bool:
    """One round. The second look at the idle `first` is for poolers that hand server connections out in turns."""
    before = await first.fetchval(_PID)
    if await first.fetchval(_PID) != before:
        return True
    async with second.transaction():
        # Compared before the next look: with a single server connection that look would wait for this transaction.
        return bool(await second.fetchval(_PID) == before or await first.fetchval(_PID) != before)


async def _same_database(dsn: str, direct_dsn: str, timeout_s: float) -> bool:
    """Whether a lock that is held through one URL is seen through the other one: such locks belong to a database."""
    key = secrets.randbits(62)
    direct = await _connect(direct_dsn, timeout_s)
    try:
        other = await _connect(dsn, timeout_s)
        try:
            async with direct.transaction():
                await direct.fetchval(_TRY_LOCK, key)
                return not await other.fetchval(_TRY_LOCK, key)
        finally:
            other.terminate()
    finally:
        direct.terminate()


async def _refuses_settings(settings: ConnectSettings, kind: ConnKind) -> bool:
    """Whether a pooler of any mode stands where the settings that a session starts with have to get through."""
    try:
        conn = await asyncpg.connect(
            settings.url(kind),
            timeout=settings.connect_timeout_s,
            statement_cache_size=0,
            server_settings=settings.session_settings(kind),
        )
    except asyncpg.ProtocolViolationError:
        return True
    conn.terminate()
    return False


async def _connect(dsn: str, timeout_s: float) -> _Plain:
    """Connect with nothing that a pooler would refuse: no settings, no named prepared statements."""
    conn: _Plain = await asyncpg.connect(dsn, timeout=timeout_s, command_timeout=timeout_s, statement_cache_size=0)
    return conn
