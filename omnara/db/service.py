"""What a process asks the database about itself at start and for its readiness."""

from __future__ import annotations

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("service")


class ConnectionRoom(msgspec.Struct, frozen=True):
    """Connections that ordinary roles may have, and those taken now (ours included)."""

    allowed: int
    taken: int


async def ping(connection: Connection) -> bool:
    """Return whether the database can be written to. Raises what the driver raises when it is away. One statement."""
    return bool(await connection.fetchval(_SQL["ping"]))


async def connection_room(connection: Connection) -> ConnectionRoom:
    """Return how many connections there may be and are. One statement."""
    row = await connection.fetchrow(_SQL["connection_room"])
    assert row is not None
    return ConnectionRoom(*row)
