"""Organizations, users, projects, tokens and actors: who may call, and on whose behalf."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("accounts")


class TokenHolder(msgspec.Struct, frozen=True):
    """Who a token belongs to, with every role. The lists of one kind are parallel; `stale`: its use is to be noted."""

    key_id: UUID
    id: UUID
    display_name: str
    org_role: str | None
    stale: bool
    org_ids: list[UUID]
    org_roles: list[str]
    project_ids: list[UUID]
    project_orgs: list[UUID]
    project_roles: list[str]


class UserRow(msgspec.Struct, frozen=True):
    """A user; `email` is empty when there is none."""

    id: UUID
    email: str
    display_name: str


class MembershipRow(msgspec.Struct, frozen=True):
    """An organization with the user's role in it; `created_at` is the organization's."""

    id: UUID
    name: str
    role: str
    created_at: datetime


class ProjectRow(msgspec.Struct, frozen=True):
    """A project."""

    id: UUID
    org_id: UUID
    name: str
    created_at: datetime
    updated_at: datetime


class TokenRow(msgspec.Struct, frozen=True):
    """A personal token without its secret. `token_id` is what people see."""

    id: UUID
    user_id: UUID
    name: str
    token_id: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None


class NewActor(msgspec.Struct, frozen=True, kw_only=True):
    """An actor to make or update; None leaves a stored attribute as it is. `metadata` is JSON text."""

    org_id: UUID
    project_id: UUID
    provider: str
    provider_tenant_id: str
    provider_user_id: str
    display_name: str | None = None
    metadata: str | None = None


class FirstOrg(msgspec.Struct, frozen=True):
    """The organization that the first start made, with its first project and owner."""

    org_id: UUID
    project_id: UUID
    user_id: UUID


async def personal_token_holder(connection: Connection, token_hash: str) -> TokenHolder | None:
    """Return the user behind a valid personal token. One statement."""
    row = await connection.fetchrow(_SQL["personal_token_holder"], token_hash)
    return None if row is None else TokenHolder(*row)


async def org_key_holder(connection: Connection, token_hash: str) -> TokenHolder | None:
    """Return the key behind a valid organization token. One statement."""
    row = await connection.fetchrow(_SQL["org_key_holder"], token_hash)
    return None if row is None else TokenHolder(*row)


async def touch_token(connection: Connection, key_id: UUID, *, personal: bool) -> None:
    """Note that a token was used, unless that was noted within the hour. Never waits for a lock."""
    await connection.execute(_SQL["touch_personal_token" if personal else "touch_org_key"], key_id)


async def user_identity(connection: Connection, user_id: UUID) -> UserRow | None:
    """Return a user."""
    row = await connection.fetchrow(_SQL["user_identity"], user_id)
    return None if row is None else UserRow(*row)


async def user_orgs(connection: Connection, user_id: UUID) -> list[MembershipRow]:
    """Return a user's organizations by name."""
    return [MembershipRow(*row) for row in await connection.fetch(_SQL["user_orgs"], user_id)]


async def list_projects(
    connection: Connection, org_id: UUID, ids: Sequence[UUID], after: tuple[datetime, UUID] | None, limit: int
) -> list[ProjectRow]:
    """Return those of an organization's projects that are among `ids`, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    rows = await connection.fetch(_SQL["list_projects"], org_id, list(ids), time, last_id, limit)
    return [ProjectRow(*row) for row in rows]


async def actor_id(
    connection: Connection, project_id: UUID, provider: str, tenant_id: str, user_id: str
) -> UUID | None:
    """Return the actor of an identity in a project, if it was made before."""
    found: UUID | None = await connection.fetchval(_SQL["actor_id"], project_id, provider, tenant_id, user_id)
    return found


async def upsert_actor(connection: Connection, new_id: UUID, actor: NewActor) -> UUID:
    """Make or update an actor and return its id."""
    found: UUID = await connection.fetchval(
        _SQL["upsert_actor"],
        new_id,
        actor.org_id,
        actor.project_id,
        actor.provider,
        actor.provider_tenant_id,
        actor.provider_user_id,
        actor.display_name,
        actor.metadata,
    )
    return found


async def installation_value(connection: Connection, name: str) -> str | None:
    """Return a fact of this database."""
    value: str | None = await connection.fetchval(_SQL["installation_value"], name)
    return value


async def set_installation_value(connection: Connection, name: str, value: str) -> None:
    """Write a fact of this database."""
    await connection.execute(_SQL["set_installation_value"], name, value)


async def try_setup_lock(connection: Connection, key: int) -> bool:
    """Try to be the one who sets the database up, until this transaction ends."""
    return bool(await connection.fetchval(_SQL["lock_setup"], key))


async def has_tables(connection: Connection) -> bool:
    """Whether the tables of `first_org` are there: no server may ever have come here, or one is on its way."""
    return bool(await connection.fetchval(_SQL["has_tables"]))


async def first_org(connection: Connection) -> FirstOrg | None:
    """Return the oldest organization, or None in a database that nobody has set up."""
    row = await connection.fetchrow(_SQL["first_org"])
    return None if row is None else FirstOrg(*row)


async def insert_first_org(connection: Connection, first: FirstOrg, *, org_name: str, project_name: str) -> None:
    """Insert an organization with a project and an owner who is also the project's admin."""
    await connection.execute(_SQL["insert_org"], first.org_id, org_name)
    await connection.execute(_SQL["insert_user"], first.user_id, "Owner")
    await connection.execute(_SQL["insert_org_member"], first.org_id, first.user_id, "owner")
    await connection.execute(_SQL["insert_project"], first.project_id, first.org_id, project_name)
    await connection.execute(_SQL["insert_project_member"], first.project_id, first.user_id, "admin")


async def insert_token(
    connection: Connection, new_id: UUID, user_id: UUID, *, name: str, token_id: str, token_hash: str
) -> TokenRow:
    """Insert a personal token by its hash."""
    row = await connection.fetchrow(_SQL["insert_personal_token"], new_id, user_id, name, token_id, token_hash)
    assert row is not None
    return TokenRow(*row)


async def list_tokens(connection: Connection, user_id: UUID) -> list[TokenRow]:
    """Return a user's tokens that are not revoked, newest first."""
    return [TokenRow(*row) for row in await connection.fetch(_SQL["list_personal_tokens"], user_id)]


async def revoke_token(connection: Connection, user_id: UUID, token_id: str) -> TokenRow | None:
    """Revoke a user's token by its visible id; None when there is no such active token."""
    row = await connection.fetchrow(_SQL["revoke_personal_token"], user_id, token_id)
    return None if row is None else TokenRow(*row)
