"""Whom an input is attributed to: a user's own actor, an external actor that a key names, or nobody.

Writing an actor locks its row, so it happens only after the hot row of the agent concerned is locked: two requests for
one actor and one agent would otherwise wait for each other.
Source: contract schema ExternalActorParams and the `actor` fields; api.md §10; DESIGN §3 (order of locks).
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from omnara.access.principals import ActorIdentity, Principal
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


class KnownActor(msgspec.Struct, frozen=True):
    """The answer of `known_actor`: the id, or None when the caller acts in nobody's name."""

    id: UUID | None


def check_actor(p: Principal, external: ExternalActor | None) -> None:
    """Raise InvalidRequest when a user names an actor: only organization keys may. Needs no database."""
    if external is not None and not p.may_name_actor:
        raise InvalidRequest("actor is only allowed for organization keys")


async def known_actor(
    connection: Connection, p: Principal, project: ProjectScope, external: ExternalActor | None
) -> KnownActor | None:
    """Return the actor if it can be told by reading alone; None when it has to be written."""
    if external is not None:
        return None
    if p.may_name_actor:
        return KnownActor(None)
    found = await _find(connection, project, p.actor(project.org_id))
    return None if found is None else KnownActor(found)


async def actor_for(
    connection: Connection, p: Principal, project: ProjectScope, external: ExternalActor | None
) -> UUID | None:
    """Return the actor of what `p` does, making or updating it in the caller's transaction.

    A user's is its own; a key's is the one it names, or None. The agent concerned is locked already, or is new.
    Raises InvalidRequest as `check_actor` does.
    """
    check_actor(p, external)
    known = await known_actor(connection, p, project, external)
    if known is not None:
        return known.id
    if external is None:
        own = p.actor(project.org_id)
        return await accounts.upsert_actor(connection, new_uuid(), _own(project, own))
    return await accounts.upsert_actor(connection, new_uuid(), _external(project, external))


async def _find(connection: Connection, project: ProjectScope, own: ActorIdentity) -> UUID | None:
    return await accounts.actor_id(
        connection, project.project_id, own.provider, own.provider_tenant_id, own.provider_user_id
    )


def _own(project: ProjectScope, own: ActorIdentity) -> NewActor:
    return NewActor(
        org_id=project.org_id,
        project_id=project.project_id,
        provider=own.provider,
        provider_tenant_id=own.provider_tenant_id,
        provider_user_id=own.provider_user_id,
        display_name=own.display_name,
    )


def _external(project: ProjectScope, external: ExternalActor) -> NewActor:
    return NewActor(
        org_id=project.org_id,
        project_id=project.project_id,
        provider="external",
        provider_tenant_id=clean_text(external.provider_tenant_id),
        provider_user_id=clean_text(external.provider_user_id),
        display_name=None if external.display_name is None else clean_text(external.display_name),
        metadata=None if external.metadata is None else msgspec.json.encode(clean(external.metadata)).decode(),
    )
