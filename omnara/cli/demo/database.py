"""The demo's own look into the server's database, over connections that cannot write."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from omnara.db.accounts import installation_value
from omnara.db.connection import Connection, ConnectSettings, ConnKind, connect
from omnara.db.demo import LogFaults, StepCount, event_ids, log_faults, make_read_only, steps_by_state
from omnara.db.embedded import EmbeddedPostgres
from omnara.errors import ConfigurationError
from omnara.ids import IdKind, decode, encode

__all__ = ["Database", "installation_of", "look_into_database"]


class Database(msgspec.Struct, frozen=True):
    """What the read-only connection found."""

    faults: LogFaults
    steps: list[StepCount]
    ids: dict[int, str]


@contextlib.asynccontextmanager
async def _read_only(data_dir: Path) -> AsyncIterator[Connection | None]:
    """Yield a connection, or None while no database answers there."""
    dsn = await EmbeddedPostgres.running_dsn(data_dir)
    if dsn is None:
        yield None
        return
    connection = await connect(ConnectSettings(dsn=dsn), ConnKind.ADMIN)
    try:
        await make_read_only(connection)
        yield connection
    finally:
        connection.terminate()


async def look_into_database(data_dir: Path, agent: str) -> Database:
    """Read what is to be counted. Raises ConfigurationError if the database is down."""
    agent_id = decode(IdKind.AGENT, agent)
    async with _read_only(data_dir) as connection:
        if connection is None:
            raise ConfigurationError(f"no database answers in {data_dir}")
        ids = {number: encode(IdKind.EVENT, key) for number, key in (await event_ids(connection, agent_id)).items()}
        return Database(await log_faults(connection, agent_id), await steps_by_state(connection, agent_id), ids)


async def installation_of(data_dir: Path) -> str:
    """Return the id with which the server labels what it makes; empty if it has none yet, or there is no database."""
    async with _read_only(data_dir) as connection:
        return "" if connection is None else await installation_value(connection, "installation_id") or ""
