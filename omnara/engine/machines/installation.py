"""Which installation this is: an id of the database, for daemons and for labels on what pools make.

A daemon that finds another id behind its server's address stops, since it would be speaking to somebody else; and no
container of another installation is ever adopted or removed. Source: machines.md §10 (fixed binding), §12, §13.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from omnara.db.accounts import installation_value
from omnara.db.fleet import offer_installation_value
from omnara.engine.deps import Deps
from omnara.ids import new_uuid

__all__ = ["installation_id"]

_NAME: Final = "installation_id"


async def installation_id(deps: Deps) -> UUID:
    """Return the id of this database's installation; the first call ever makes it. One query. Raises Unavailable."""
    async with deps.db.acquire() as connection:
        found = await installation_value(connection, _NAME)
        if found is None:
            await offer_installation_value(connection, _NAME, str(new_uuid()))
            found = await installation_value(connection, _NAME)
    if found is None:
        raise LookupError("the installation's id was not kept")
    return UUID(found)
