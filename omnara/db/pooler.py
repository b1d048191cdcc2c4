"""Finds out whether a URL leads through a transaction pooler, and what that means for the settings.

Behind such a pooler session locks stay with a server connection after their owner is gone and LISTEN hears nothing,
mostly without any error. A test with one connection passes there, so this one uses two. Source: coordination §11.4.
"""

from __future__ import annotations

from typing import Final

import asyncpg
import msgspec

from omnara.db.connection import ConnectSettings
from omnara.errors import ConfigurationError

_PID: Final = "select pg_backend_pid()"


async def is_transaction_pooler(dsn: str, *, timeout_s: float = 5.0) -> bool:
    """Whether two client connections of `dsn` share server connections: a, then a transaction on b, then a again.

    Opens and closes two connections. Raises what the driver raises when the server is away.
    """
    first = await _connect(dsn, timeout_s)
    try:
        second = await _connect(dsn, timeout_s)
        try:
            before = await first.fetchval(_PID)
            async with second.transaction():
                other = await second.fetchval(_PID)
                after = await first.fetchval(_PID)
        finally:
            second.terminate()
    finally:
        first.terminate()
    return bool(before != after or before == other)


async def resolve(settings: ConnectSettings) -> ConnectSettings:
    """Return `settings` with `pooled` set to what is found; call once at start, before any other connection.

    Raises `ConfigurationError` when the only URL is pooled, or when the direct URL is pooled too.
    """
    pooled = await is_transaction_pooler(settings.dsn, timeout_s=settings.connect_timeout_s)
    if settings.direct_dsn is not None:
        if await is_transaction_pooler(settings.direct_dsn, timeout_s=settings.connect_timeout_s):
            raise ConfigurationError(
                "OMNARA_DATABASE_DIRECT_URL leads through a transaction pooler; it must reach Postgres itself"
            )
    elif pooled:
        raise ConfigurationError(
            "OMNARA_DATABASE_URL leads through a transaction pooler, where locks and LISTEN do not work; "
            "set OMNARA_DATABASE_DIRECT_URL to a URL that reaches Postgres itself"
        )
    return msgspec.structs.replace(settings, pooled=pooled)


async def _connect(dsn: str, timeout_s: float) -> asyncpg.Connection[asyncpg.Record]:
    """Connect with nothing that a pooler would refuse: no settings, no named prepared statements."""
    return await asyncpg.connect(dsn, timeout=timeout_s, command_timeout=timeout_s, statement_cache_size=0)
