"""Secrets of organizations, projects and users: sealed on arrival, never shown again.

The plaintext lives in the request and in the arguments of one function; what is stored, listed, logged or refused
never holds it. Source: api.md §3 (finer checks by owner), §14; DESIGN §2, invariant 7; contract (deleteSecret).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, assert_never
from uuid import UUID

import msgspec

from omnara.access.principals import Principal, PrincipalKind
from omnara.access.roles import Decision, OrgAction, ProjectAction, ProjectScope, can, require
from omnara.db import orgs, owned_secrets, secrets
from omnara.db.connection import Connection
from omnara.db.owned_secrets import NewSecret, SecretRow
from omnara.db.secrets import SealedRow
from omnara.domain.text import clean
from omnara.engine.catalog import SECRET_FIELD
from omnara.engine.deps import Deps
from omnara.engine.naming import checked_name
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, Forbidden, InvalidRequest, NotFound
from omnara.ids import new_uuid
from omnara.vault import Secret, seal, secret_aad

MAX_SECRETS: Final = 10_000
"""Per organization. Source: api.md §8 (resource caps)."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Source: api.md §14."""


OwnerKind = Literal["org", "project", "user"]


class Owner(msgspec.Struct, frozen=True):
    """To whom a new secret belongs; `project_id` only for a project's."""

    kind: OwnerKind
    project_id: UUID | None = None


async def create_secret(
    deps: Deps, p: Principal, org_id: UUID, owner: Owner, name: str, value: Secret, metadata: Mapping[str, str]
) -> SecretRow:
    """Seal a value as the first version of a new generic secret. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name or at the cap.
    """
    org_in_scope(p, org_id, OrgAction.READ)
    shown, stored = checked_name(name), encoded_metadata(metadata)

    async def work(connection: Connection) -> SecretRow:
        await _require_owner(connection, p, org_id, owner)
        if await owned_secrets.count(connection, org_id) >= MAX_SECRETS:
            raise Conflict(f"an organization may have {MAX_SECRETS} secrets")
        new = NewSecret(
            id=new_uuid(),
            org_id=org_id,
            owner_kind=owner.kind,
            owner_project_id=owner.project_id,
            owner_user_id=p.id if owner.kind == "user" else None,
            name=shown,
            kind="generic",
            metadata=stored,
        )
        if not await owned_secrets.add(connection, new):
            raise Conflict("a secret of this name exists")
        await _seal_version(deps, connection, new.id, shown, 1, value)
        return await _read(connection, org_id, new.id)

    return await deps.db.run(work)


async def get_secret(deps: Deps, p: Principal, org_id: UUID, secret_id: UUID) -> SecretRow:
    """Return a secret without its value. Raises NotFound."""
    async with deps.db.acquire() as connection:
        return await readable(connection, p, org_id, secret_id)


async def update_secret(
    deps: Deps, p: Principal, org_id: UUID, secret_id: UUID, name: str | None, metadata: Mapping[str, str] | None
) -> SecretRow:
    """Rename a secret or replace its metadata; None leaves a part as it is. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name.
    """
    shown = None if name is None else checked_name(name)
    stored = None if metadata is None else encoded_metadata(metadata)

    async def work(connection: Connection) -> SecretRow:
        await locked(connection, p, org_id, secret_id)
        if not await owned_secrets.change(connection, secret_id, shown, stored):
            raise Conflict("a secret of this name exists")
        return await _read(connection, org_id, secret_id)

    return await deps.db.run(work)


async def add_version(deps: Deps, p: Principal, org_id: UUID, secret_id: UUID, value: Secret) -> SecretRow:
    """Seal a new value under the ring's active key and make it the current one. Own transaction.

    What uses the secret sees the new value within the catalogue's second. Raises NotFound, Forbidden, InvalidRequest
    for a secret of another kind.
    """

    async def work(connection: Connection) -> SecretRow:
        row = await locked(connection, p, org_id, secret_id)
        if row.kind != "generic":
            raise InvalidRequest("the secret is of another kind")
        await _seal_version(deps, connection, secret_id, row.name, row.current_version + 1, value)
        return await _read(connection, org_id, secret_id)

    return await deps.db.run(work)


async def delete_secret(deps: Deps, p: Principal, org_id: UUID, secret_id: UUID) -> None:
    """Destroy all versions and grants of a secret for good. Own transaction.

    Raises NotFound, Forbidden, Conflict while a model provider or a machine uses it.
    """

    async def work(connection: Connection) -> None:
        await locked(connection, p, org_id, secret_id)
        used_by = await owned_secrets.in_use(connection, org_id, secret_id)
        if used_by is not None:
            raise Conflict(f"a {used_by} uses the secret")
        await owned_secrets.destroy(connection, secret_id)

    await deps.db.run(work)


# --- rights -----------------------------------------------------------------------------------------------


async def readable(connection: Connection, p: Principal, org_id: UUID, secret_id: UUID) -> SecretRow:
    """Return a secret that the caller may see. Raises NotFound."""
    org_in_scope(p, org_id, OrgAction.READ)
    row = await owned_secrets.find(connection, org_id, secret_id)
    if row is None or not _may(p, row, ProjectAction.READ):
        raise NotFound("secret")
    return row


async def locked(connection: Connection, p: Principal, org_id: UUID, secret_id: UUID) -> SecretRow:
    """Lock a secret that the caller may change, and return it. Raises NotFound, Forbidden."""
    await owned_secrets.lock(connection, org_id, secret_id)
    row = await readable(connection, p, org_id, secret_id)
    if not _may(p, row, ProjectAction.MANAGE):
        raise Forbidden
    return row


def manages_org(p: Principal, org_id: UUID) -> bool:
    """Whether the caller manages the organization, and so all its secrets but those of users. Source: api.md §3."""
    return can(p, OrgAction.MANAGE, org_id) is Decision.ALLOWED


def _may(p: Principal, row: SecretRow, action: ProjectAction) -> bool:
    if row.owner_kind == "user":
        return p.kind is PrincipalKind.USER and row.owner_user_id == p.id
    if manages_org(p, row.org_id):
        return True
    if row.owner_project_id is None:
        return False
    return can(p, action, ProjectScope(row.org_id, row.owner_project_id)) is Decision.ALLOWED


async def _require_owner(connection: Connection, p: Principal, org_id: UUID, owner: Owner) -> None:
    match owner.kind:
        case "org":
            require(p, OrgAction.MANAGE, org_id)
        case "user":
            if p.kind is not PrincipalKind.USER:
                raise InvalidRequest("an organization key owns no secrets")
        case "project":
            assert owner.project_id is not None, "a project's secret names its project"
            if not manages_org(p, org_id):
                require(p, ProjectAction.MANAGE, ProjectScope(org_id, owner.project_id))
            if await orgs.project_of_org(connection, org_id, owner.project_id) is None:
                raise NotFound("project")
        case _:
            assert_never(owner.kind)


# --- parts ------------------------------------------------------------------------------------------------


def encoded_metadata(metadata: Mapping[str, str]) -> str:
    """Return metadata as stored JSON text. Raises InvalidRequest when there is too much of it."""
    text = msgspec.json.encode(clean(dict(metadata)))
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata may have {MAX_METADATA_BYTES} bytes")
    return text.decode()


async def _seal_version(
    deps: Deps, connection: Connection, secret_id: UUID, name: str, version: int, value: Secret
) -> None:
    payload = msgspec.json.encode({SECRET_FIELD: value.reveal()})
    sealed = seal(deps.ring, payload, secret_aad(secret_id, version))
    row = SealedRow(secret_id, name, version, sealed.key_id, sealed.wrapped_key, sealed.nonce, sealed.ciphertext)
    await secrets.insert_version(connection, row, [SECRET_FIELD])


async def _read(connection: Connection, org_id: UUID, secret_id: UUID) -> SecretRow:
    row = await owned_secrets.find(connection, org_id, secret_id)
    assert row is not None, "it was written in this transaction"
    return row
