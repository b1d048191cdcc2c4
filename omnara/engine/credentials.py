"""Organization keys and personal tokens: made, listed, revoked. A token is shown once, when it is made.

Which kinds of caller may make or revoke them is said by the routes. Source: api.md §2, §3; contract.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from omnara.access import tokens
from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction
from omnara.access.tokens import BearerToken, TokenKind
from omnara.db import accounts, credentials, orgs
from omnara.db.accounts import TokenRow
from omnara.db.connection import Connection
from omnara.db.credentials import NewOrgKey, OrgKeyRow
from omnara.engine.deps import Deps
from omnara.engine.naming import checked_name
from omnara.engine.reads import Page, TimeKey
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, Forbidden, NotFound
from omnara.ids import new_uuid

MAX_TOKENS: Final = 1000
"""Active personal tokens of one user. Source: api.md §2."""


class MadeKey(msgspec.Struct, frozen=True):
    """A new organization key with its token."""

    token: BearerToken
    row: OrgKeyRow


class MadeToken(msgspec.Struct, frozen=True):
    """A new personal token."""

    token: BearerToken
    row: TokenRow


async def list_keys(deps: Deps, p: Principal, org_id: UUID, *, after: TimeKey | None, limit: int) -> Page[OrgKeyRow]:
    """Return an organization's keys, revoked ones too, newest first. Raises NotFound, Forbidden."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        rows = await credentials.list_keys(connection, org_id, after, limit + 1)
    return Page(rows[:limit], len(rows) > limit)


async def get_key(deps: Deps, p: Principal, org_id: UUID, key_id: UUID) -> OrgKeyRow:
    """Return a key. Raises NotFound, Forbidden."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        return await _key(connection, org_id, key_id)


async def create_key(deps: Deps, p: Principal, org_id: UUID, name: str, role: str) -> MadeKey:
    """Make a key of an organization, without a role in any project. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown, token, key_id = checked_name(name), tokens.generate(TokenKind.ORG), new_uuid()

    async def work(connection: Connection) -> OrgKeyRow:
        new = NewOrgKey(
            id=key_id,
            org_id=org_id,
            name=shown,
            org_role=role,
            token_id=tokens.new_token_id(),
            token_hash=token.hash,
            created_by_user_id=p.id,
        )
        if not await credentials.add_key(connection, new):
            raise Conflict("an active key has this name")
        return await _key(connection, org_id, key_id)

    return MadeKey(token, await deps.db.run(work))


async def update_key(
    deps: Deps, p: Principal, org_id: UUID, key_id: UUID, name: str | None, role: str | None
) -> OrgKeyRow:
    """Rename a key or change its role; None leaves a part as it is. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name or a revoked key.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown = None if name is None else checked_name(name)

    async def work(connection: Connection) -> OrgKeyRow:
        if await credentials.lock_key(connection, org_id, key_id):
            raise Conflict("the key is revoked")
        await _key(connection, org_id, key_id)
        if not await credentials.change_key(connection, key_id, shown, role):
            raise Conflict("an active key has this name")
        return await _key(connection, org_id, key_id)

    return await deps.db.run(work)


async def revoke_key(deps: Deps, p: Principal, org_id: UUID, key_id: UUID) -> OrgKeyRow:
    """Make a key worthless for good; may be repeated. Own transaction. Raises NotFound, Forbidden."""
    org_in_scope(p, org_id, OrgAction.MANAGE)

    async def work(connection: Connection) -> OrgKeyRow:
        await credentials.lock_key(connection, org_id, key_id)
        await credentials.revoke_key(connection, (await _key(connection, org_id, key_id)).id)
        return await _key(connection, org_id, key_id)

    return await deps.db.run(work)


async def list_tokens(deps: Deps, p: Principal, *, after: TimeKey | None, limit: int) -> Page[TokenRow]:
    """Return the caller's personal tokens, revoked ones too, newest first. Raises Forbidden for keys."""
    async with deps.db.acquire() as connection:
        rows = await credentials.list_tokens(connection, _user(p), after, limit + 1)
    return Page(rows[:limit], len(rows) > limit)


async def create_token(deps: Deps, p: Principal, name: str) -> MadeToken:
    """Make a personal token of the caller. Own transaction. Raises Forbidden, InvalidRequest, Conflict at the cap."""
    user_id, shown, token = _user(p), checked_name(name), tokens.generate(TokenKind.PERSONAL)

    async def work(connection: Connection) -> TokenRow:
        if not await orgs.lock_user(connection, user_id):
            raise Forbidden
        if await credentials.count_tokens(connection, user_id) >= MAX_TOKENS:
            raise Conflict(f"a user may have {MAX_TOKENS} active tokens")
        return await accounts.insert_token(
            connection, new_uuid(), user_id, name=shown, token_id=tokens.new_token_id(), token_hash=token.hash
        )

    return MadeToken(token, await deps.db.run(work))


async def revoke_token(deps: Deps, p: Principal, token_id: UUID) -> TokenRow:
    """Make one of the caller's tokens worthless for good; may be repeated. Own transaction. Raises NotFound."""

    async def work(connection: Connection) -> TokenRow:
        row = await credentials.revoke_token(connection, _user(p), token_id)
        if row is None:
            raise NotFound("personal access token")
        return row

    return await deps.db.run(work)


def _user(p: Principal) -> UUID:
    if p.kind is not PrincipalKind.USER:
        raise Forbidden("organization keys have no personal tokens")
    return p.id


async def _key(connection: Connection, org_id: UUID, key_id: UUID) -> OrgKeyRow:
    row = await credentials.find_key(connection, org_id, key_id)
    if row is None:
        raise NotFound("API key")
    return row
