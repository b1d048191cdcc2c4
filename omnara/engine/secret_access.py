"""Which secrets a caller and a project can see, and the grants that let projects use them.

Source: contract (listSecrets, listProjectAvailableSecrets, createSecretGrant); api.md §3, §7, §8.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import OrgAction, ProjectAction, ProjectScope, require
from omnara.db import orgs, owned_secrets
from omnara.db.accounts import ProjectRow
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.owned_secrets import AvailableScope, SecretGrantRow, SecretRow, SecretScope
from omnara.engine.deps import Deps
from omnara.engine.org_secrets import encoded_metadata, locked, manages_org, readable
from omnara.engine.scope import org_in_scope, project_in_scope
from omnara.errors import Conflict, NotFound
from omnara.ids import new_uuid


class SecretFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What to list; None asks for everything. `source` (direct or grant) is for a project's view."""

    kind: str | None = None
    owner_kind: str | None = None
    owner_project_id: UUID | None = None
    source: str | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def metadata_text(self) -> str | None:
        """The metadata as JSON text."""
        return None if self.metadata is None else encoded_metadata(self.metadata)


class AvailableSecret(msgspec.Struct, frozen=True):
    """A secret that a project may use; `grant_id` is None for its own."""

    row: SecretRow
    grant_id: UUID | None


class SecretGrant(msgspec.Struct, frozen=True):
    """A grant with the project that it is for."""

    row: SecretGrantRow
    project: ProjectRow


async def list_secrets(
    deps: Deps, p: Principal, org_id: UUID, wanted: SecretFilter, order: ListOrder
) -> list[tuple[str, SecretRow]]:
    """Return secrets that the caller may see, with sort values; one more than the page when there are more."""
    org_in_scope(p, org_id, OrgAction.READ)
    mine = [project_id for project_id, grant in p.project_grants.items() if grant.org_id == org_id]
    scope = SecretScope(
        org_id=org_id,
        whole_org=manages_org(p, org_id),
        project_ids=mine,
        user_id=p.id if p.kind is PrincipalKind.USER else None,
        kind=wanted.kind,
        owner_kind=wanted.owner_kind,
        owner_project_id=wanted.owner_project_id,
        metadata=wanted.metadata_text,
    )
    async with deps.db.acquire() as connection:
        return await owned_secrets.list_owned(connection, scope, order)


async def list_available(
    deps: Deps, p: Principal, project: ProjectScope, wanted: SecretFilter, order: ListOrder
) -> list[tuple[str, AvailableSecret]]:
    """Return what a project may use, with sort values; one more than the page when there are more."""
    project_in_scope(p, project, ProjectAction.READ)
    scope = AvailableScope(
        org_id=project.org_id,
        project_id=project.project_id,
        kind=wanted.kind,
        owner_kind=wanted.owner_kind,
        source=wanted.source,
        metadata=wanted.metadata_text,
    )
    async with deps.db.acquire() as connection:
        rows = await owned_secrets.list_available(connection, scope, order)
    return [(key, AvailableSecret(row, grant_id)) for key, row, grant_id in rows]


async def get_available(deps: Deps, p: Principal, project: ProjectScope, secret_id: UUID) -> AvailableSecret:
    """Return one secret that a project may use. Raises NotFound."""
    project_in_scope(p, project, ProjectAction.READ)
    scope = AvailableScope(org_id=project.org_id, project_id=project.project_id, secret_id=secret_id)
    async with deps.db.acquire() as connection:
        found = await owned_secrets.list_available(connection, scope, ListOrder(limit=1))
    if not found:
        raise NotFound("secret")
    _, row, grant_id = found[0]
    return AvailableSecret(row, grant_id)


async def create_grant(deps: Deps, p: Principal, org_id: UUID, secret_id: UUID, project_id: UUID) -> SecretGrantRow:
    """Let a project of the organization use a secret. Own transaction.

    The caller may change the secret, and gives rights in the project. Raises NotFound, Forbidden, Conflict when the
    project can use the secret already.
    """

    async def work(connection: Connection) -> SecretGrantRow:
        row = await locked(connection, p, org_id, secret_id)
        if not manages_org(p, org_id):
            require(p, ProjectAction.ACCESS, ProjectScope(org_id, project_id))
        if await orgs.project_of_org(connection, org_id, project_id) is None:
            raise NotFound("project")
        if row.owner_project_id == project_id:
            raise Conflict("the secret is the project's own")
        made = await owned_secrets.add_grant(connection, new_uuid(), secret_id, project_id)
        if made is None:
            raise Conflict("the project may use the secret already")
        return made

    return await deps.db.run(work)


async def delete_grant(deps: Deps, p: Principal, org_id: UUID, secret_id: UUID, grant_id: UUID) -> None:
    """Take a secret from a project. Own transaction. Raises NotFound, Forbidden."""

    async def work(connection: Connection) -> None:
        await locked(connection, p, org_id, secret_id)
        if not await owned_secrets.drop_grant(connection, secret_id, grant_id):
            raise NotFound("secret grant")

    await deps.db.run(work)


async def list_grants(
    deps: Deps, p: Principal, org_id: UUID, secret_id: UUID, order: ListOrder
) -> list[tuple[str, SecretGrant]]:
    """Return a secret's grants with sort values; one more than the page when there are more. Raises NotFound."""
    async with deps.db.acquire() as connection:
        await readable(connection, p, org_id, secret_id)
        rows = await owned_secrets.list_grants(connection, secret_id, order)
    return [(key, SecretGrant(row, project)) for key, row, project in rows]
