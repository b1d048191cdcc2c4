"""What a database exception means: the one place where SQLSTATEs are read.

A caller never asks "which class is this?" but one of five questions, because each has a different consequence: is the
connection gone, did the statement surely not happen, is it the data's fault, is it worth trying again, should the
client be told 503. Source: coordination §5 (unknown outcomes), §9 (retries), §10 (data errors in a group).
"""

from __future__ import annotations

from typing import Final

import asyncpg
from asyncpg import exceptions as pg

from omnara.errors import Unavailable

RETRYABLE_STATES: Final = frozenset({"40P01", "40001", "55P03"})
"""Deadlock, serialization failure, lock not available. Source: coordination §9."""

_SERVER_GOING_AWAY: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"})
_READ_ONLY_SESSION: Final = "25006"
_UNKNOWN_COMPLETION: Final = "40003"
_OUT_OF_ROOM: Final = frozenset({"53000", "53100", "53200", "53300", "53400"})
_DATA_CLASSES: Final = ("22", "23", "54")


class DatabaseUnavailable(Unavailable):
    """Postgres cannot be reached, is not writable, or did not answer in time. `__cause__` holds the first error."""


class ServerNotWritable(asyncpg.InternalClientError):
    """The server that answered is a standby; its advisory locks mean nothing. Source: coordination §1.2 (failover)."""


CONNECT_ERRORS: Final = (
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    DatabaseUnavailable,
)
"""All that a connection attempt, a heartbeat or a farewell may raise when the server is away; includes time-outs."""


def sqlstate(exc: BaseException) -> str | None:
    """Return the five-character code the server gave, or None when the error was not the server's."""
    return exc.sqlstate if isinstance(exc, asyncpg.PostgresError) else None


def is_connection_loss(exc: BaseException) -> bool:
    """Whether the connection is gone, could not be made, or leads to a server that must not be written to.

    Such a connection is to be replaced. Says nothing about whether the last statement happened.
    A read-only session counts: after a failover it stays read-only for as long as it lives.
    """
    if isinstance(exc, DatabaseUnavailable):
        return exc.__cause__ is None or is_connection_loss(exc.__cause__)
    state = sqlstate(exc)
    if state is not None:
        return state.startswith("08") or state in _SERVER_GOING_AWAY or state in (_READ_ONLY_SESSION, "53300")
    if isinstance(exc, pg.InterfaceError):
        return "connection is closed" in str(exc)
    return isinstance(exc, (OSError, asyncpg.InternalClientError, EOFError)) and not isinstance(exc, TimeoutError)


def is_definite_sql_error(exc: BaseException) -> bool:
    """Whether the statement certainly changed nothing: the server refused it, or it never left this process.

    Everything else (time-out, cancellation, a cut connection, a shutdown) is *unknown* and must be resolved by
    reading. Source: coordination §5 rule 6.
    """
    state = sqlstate(exc)
    if state is None:
        return isinstance(exc, pg.InterfaceError) and not is_connection_loss(exc)
    return not (state.startswith("08") or state in _SERVER_GOING_AWAY or state == _UNKNOWN_COMPLETION)


def is_data_error(exc: BaseException) -> bool:
    """Whether one row's content is at fault, so that the other rows of a group would have been accepted.

    Source: coordination §10 (a bad payload falls back to single saves).
    """
    state = sqlstate(exc)
    if state is not None:
        return state.startswith(_DATA_CLASSES)
    return isinstance(exc, UnicodeError)


def is_retryable(exc: BaseException) -> bool:
    """Whether running the same transaction again at once may succeed, and the first run surely changed nothing.

    Includes a prepared plan that a migration elsewhere made stale: inside a transaction asyncpg cannot repeat it.
    """
    return sqlstate(exc) in RETRYABLE_STATES or isinstance(
        exc, (pg.InvalidCachedStatementError, pg.OutdatedSchemaCacheError)
    )


def is_unavailability(exc: BaseException) -> bool:
    """Whether a request that met this error should answer 503: the same request may succeed a little later."""
    if isinstance(exc, TimeoutError) or is_connection_loss(exc) or is_retryable(exc):
        return True
    state = sqlstate(exc)
    return state in _OUT_OF_ROOM or state == "57014"


def as_unavailable(exc: BaseException, doing: str) -> DatabaseUnavailable:
    """Wrap `exc` for the caller. The text names what was tried and the kind of error, never the server's words.

    Raise the result `from exc`: the cause is how the questions above are still answered afterwards.
    """
    return DatabaseUnavailable(f"{doing} ({sqlstate(exc) or type(exc).__name__})", retry_after_s=1.0)
