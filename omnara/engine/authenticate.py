"""From a bearer token to a principal: shape and checksum first, then one query.

Source: api.md §2 (a malformed token never reaches the database; `last_used_at` moves at most once an hour).
"""

from __future__ import annotations

from omnara.access import load, tokens
from omnara.access.principals import Credential, Principal
from omnara.access.tokens import TokenKind
from omnara.db import accounts
from omnara.engine.deps import Deps
from omnara.errors import Unauthorized


async def authenticate(deps: Deps, header: str | None) -> Principal:
    """Return the caller of a request from its `Authorization` header.

    Raises Unauthorized when the header, the token or its owner is no good, all with the same text. One query; a second
    one, at most once an hour and token, notes the use.
    """
    text = tokens.bearer_from_header(header)
    if text is None:
        raise Unauthorized
    try:
        token = tokens.parse(text)
    except tokens.InvalidToken:
        raise Unauthorized from None
    if token.kind is TokenKind.DAEMON:
        raise Unauthorized
    personal = token.kind is TokenKind.PERSONAL
    find = accounts.personal_token_holder if personal else accounts.org_key_holder
    async with deps.db.acquire() as connection:
        holder = await find(connection, token.hash)
        if holder is None:
            raise Unauthorized
        if holder.stale:
            await accounts.touch_token(connection, holder.key_id, personal=personal)
    return load.principal(
        Credential.PERSONAL_TOKEN if personal else Credential.ORG_KEY,
        holder.id,
        key_id=holder.key_id,
        display_name=holder.display_name,
        orgs=list(zip(holder.org_ids, holder.org_roles, strict=True)),
        projects=list(zip(holder.project_ids, holder.project_orgs, holder.project_roles, strict=True)),
    )
