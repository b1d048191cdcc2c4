"""Which machine a daemon's token stands for. The daemon never names its machine: the token does.

A refusal here makes a daemon end every command and wipe its state, so it is given only for a token that certainly is no
good; everything else is 503. Source: machines.md §1, §2 (how the daemon reacts), §14 row 16.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access import tokens
from omnara.access.tokens import TokenKind
from omnara.db import runtimes as db
from omnara.engine.deps import Deps
from omnara.engine.machines.installation import installation_id
from omnara.errors import Unauthorized

__all__ = ["DaemonIdentity", "authenticate_daemon", "installation_id"]


class DaemonIdentity(msgspec.Struct, frozen=True):
    """A machine, proven by a token."""

    machine_id: UUID
    org_id: UUID
    token_id: UUID


async def authenticate_daemon(deps: Deps, token: str) -> DaemonIdentity:
    """Return the machine of a daemon's token (the bare token, without `Bearer`). One query.

    Raises Unauthorized for a token that was never issued, is revoked, or whose machine is deleted or takes no daemon;
    Unavailable when Postgres cannot say. At most once an hour and token, its use is noted.
    """
    try:
        parsed = tokens.parse(token)
    except tokens.InvalidToken:
        raise Unauthorized from None
    if parsed.kind is not TokenKind.DAEMON:
        raise Unauthorized
    async with deps.db.acquire() as connection:
        holder = await db.token_holder(connection, parsed.hash)
        if holder is None:
            raise Unauthorized
        if holder.stale:
            await db.touch_token(connection, holder.token_id)
    return DaemonIdentity(holder.machine_id, holder.org_id, holder.token_id)
