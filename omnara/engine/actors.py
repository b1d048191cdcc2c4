"""Whom an input is attributed to: a user's own actor, an external actor that a key names, or nobody.

Source: contract schema ExternalActorParams and the `actor` fields; api.md §10.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectScope
from omnara.db import accounts
from omnara.db.accounts import NewActor
from omnara.db.connection import Connection
from omnara.domain.text import clean, clean_text
from omnara.errors import InvalidRequest
from omnara.ids import new_uuid


class ExternalActor(msgspec.Struct, frozen=True, omit_defaults=True):
    """An actor of the caller's own system. None leaves a stored attribute as it is."""

    provider_user_id: str
    provider_tenant_id: str = ""
    display_name: str | None = None
    metadata: dict[str, str] | None = None


def check_actor(p: Principal, external: ExternalActor | None) -> None:
    """Raise InvalidRequest when a user names an actor: only organization keys may. Needs no database."""
    if external is not None and not p.may_name_actor:
        raise InvalidRequest("actor is only allowed for organization keys")


async def actor_for(
    connection: Connection, p: Principal, project: ProjectScope, external: ExternalActor | None
) -> UUID | None:
    """Return the actor of what `p` does, making or updating it in the caller's transaction.

    A user's is its own; a key's is the one it names, or None. Raises InvalidRequest as `check_actor` does.
    """
    check_actor(p, external)
    if external is not None:
        metadata = None if external.metadata is None else msgspec.json.encode(clean(external.metadata)).decode()
        display_name = None if external.display_name is None else clean_text(external.display_name)
        named = NewActor(
            org_id=project.org_id,
            project_id=project.project_id,
            provider="external",
            provider_tenant_id=clean_text(external.provider_tenant_id),
            provider_user_id=clean_text(external.provider_user_id),
            display_name=display_name,
            metadata=metadata,
        )
        return await accounts.upsert_actor(connection, new_uuid(), named)
    if p.may_name_actor:
        return None
    own = p.actor(project.org_id)
    found = await accounts.actor_id(
        connection, project.project_id, own.provider, own.provider_tenant_id, own.provider_user_id
    )
    if found is not None:
        return found
    new = NewActor(
        org_id=project.org_id,
        project_id=project.project_id,
        provider=own.provider,
        provider_tenant_id=own.provider_tenant_id,
        provider_user_id=own.provider_user_id,
        display_name=own.display_name,
    )
    return await accounts.upsert_actor(connection, new_uuid(), new)
