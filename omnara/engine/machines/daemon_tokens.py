"""Tokens with which daemons join: made, listed, revoked. A token is shown once, when it is made.

A token belongs to one machine and says which: the daemon never names it. Machines of pools get theirs when they are
provisioned, so people make none for them. Source: machines.md §1, §8; api.md §2; contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

from omnara.access import tokens
from omnara.access.principals import Principal
from omnara.access.tokens import BearerToken, TokenKind
from omnara.db import daemon_tokens
from omnara.db.connection import Connection
from omnara.db.daemon_tokens import DaemonTokenRow, NewDaemonToken
from omnara.engine.deps import Deps
from omnara.engine.machines.access import locked, managed
from omnara.engine.machines.environment import stored_metadata
from omnara.engine.naming import checked_name
from omnara.engine.reads import Page, TimeKey
from omnara.errors import Conflict, InvalidRequest, NotFound
from omnara.ids import new_uuid

MAX_TOKENS: Final = 20
"""Unrevoked ones of one machine. Source: machines.md §1."""
SUPERSEDED: Final = "superseded"


async def create_token(
    deps: Deps, p: Principal, org_id: UUID, machine_id: UUID, name: str, metadata: Mapping[str, str]
) -> tuple[BearerToken, DaemonTokenRow]:
    """Make a token of a machine that somebody connects. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest (also for a machine of a pool), Conflict at the cap.
    """

    async def work(connection: Connection) -> tuple[BearerToken, DaemonTokenRow]:
        row = await locked(connection, p, org_id, machine_id)
        if row.source_kind != "byo":
            raise InvalidRequest("machines of pools get their tokens when they are provisioned")
        return await add_token(connection, org_id, machine_id, name, metadata)

    return await deps.db.run(work)


async def add_token(
    connection: Connection, org_id: UUID, machine_id: UUID, name: str, metadata: Mapping[str, str]
) -> tuple[BearerToken, DaemonTokenRow]:
    """Make a token of a locked machine in the caller's transaction. Raises InvalidRequest, Conflict at the cap."""
    shown = checked_name(name) if name else ""
    if await daemon_tokens.count(connection, machine_id) >= MAX_TOKENS:
        raise Conflict(f"a machine may have {MAX_TOKENS} tokens; revoke one")
    token = tokens.generate(TokenKind.DAEMON)
    new = NewDaemonToken(
        id=new_uuid(),
        org_id=org_id,
        machine_id=machine_id,
        name=shown,
        metadata=stored_metadata(metadata),
        token_hash=token.hash,
    )
    await daemon_tokens.add(connection, new)
    return token, await _found(connection, machine_id, new.id)


async def mint(connection: Connection, org_id: UUID, machine_id: UUID, name: str) -> BearerToken:
    """Make the token of an attempt to make a locked machine of a pool, in the caller's transaction.

    Those of earlier attempts stay good, since their machine may be found to exist; of more than the cap, the oldest go.
    Source: machines.md §12.
    """
    await daemon_tokens.trim(connection, machine_id, MAX_TOKENS - 1, SUPERSEDED)
    token, _ = await add_token(connection, org_id, machine_id, name, {})
    return token


async def list_tokens(
    deps: Deps, p: Principal, org_id: UUID, machine_id: UUID, *, after: TimeKey | None, limit: int
) -> Page[DaemonTokenRow]:
    """Return a machine's tokens, revoked ones too, newest first. Raises NotFound, Forbidden."""
    async with deps.db.acquire() as connection:
        await managed(connection, p, org_id, machine_id)
        rows = await daemon_tokens.list_tokens(connection, machine_id, after, limit + 1)
    return Page(rows[:limit], len(rows) > limit)


async def _found(connection: Connection, machine_id: UUID, token_id: UUID) -> DaemonTokenRow:
    row = await daemon_tokens.find(connection, machine_id, token_id)
    if row is None:
        raise NotFound("daemon token")
    return row
