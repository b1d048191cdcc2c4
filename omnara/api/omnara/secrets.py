"""Routes of secrets: values come in and never go out."""

from __future__ import annotations

from typing import Any, Final, assert_never
from uuid import UUID

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.omnara.decode import given, id_in_body
from omnara.api.omnara.orgs import ORG, ORG_PATH
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.scalars import MCPOAuthFlowID, ProjectID
from omnara.api.omnara.types.secrets import (
    CreateSecretRequest,
    GenericSecretMaterial,
    ListSecretsResponse,
    OrgSecretOwner,
    OrgSecretOwnerInput,
    ProjectSecretOwner,
    ProjectSecretOwnerInput,
    Secret,
    SecretKind,
    SecretMaterial,
    SecretVersionRequest,
    UpdateSecretRequest,
    UserSecretOwner,
    UserSecretOwnerInput,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.owned_secrets import SecretRow
from omnara.engine import org_secrets, secret_access
from omnara.engine.org_secrets import Owner
from omnara.engine.secret_access import SecretFilter
from omnara.errors import InvalidRequest, Unprocessable
from omnara.ids import IdKind, encode
from omnara.vault import Secret as Value

SECRET = {**ORG, "secretID": IdKind.SECRET}
SECRETS_PATH = f"{ORG_PATH}/secrets"
SECRET_PATH = f"{SECRETS_PATH}/{{secretID}}"
READ_ERRORS = frozenset({400, 401, 403, 404, 500, 503})
WRITE_ERRORS = READ_ERRORS | {409}


class SecretsQuery(ResourceQuery, frozen=True, kw_only=True):
    """Which secrets to list."""

    kind: SecretKind | UnsetType = UNSET
    owner_kind: org_secrets.OwnerKind | UnsetType = UNSET
    owner_project_id: ProjectID | UnsetType = UNSET
    mcp_oauth_flow_id: MCPOAuthFlowID | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


def secret(row: SecretRow) -> Secret:
    """A secret without its value."""
    kind: Any = row.kind
    return Secret(
        id=encode(IdKind.SECRET, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        management_kind="tenant",
        owner=_owner(row),
        name=row.name,
        kind=kind,
        metadata=msgspec.json.decode(row.metadata, type=dict[str, str]),
        current_version_number=row.current_version,
        payload_keys=row.payload_keys,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


async def create_secret(call: Call) -> web.StreamResponse:
    """A new secret."""
    body: CreateSecretRequest = call.body
    row = await org_secrets.create_secret(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        _owner_of(body),
        body.name,
        _value(body.material),
        given(body.metadata) or {},
    )
    return reply(201, secret(row))


async def list_secrets(call: Call) -> web.StreamResponse:
    """A page of the secrets that the caller may see."""
    query: SecretsQuery = call.query
    org_id = call.ids["orgID"]
    wanted = secret_filter(query, owner_project_id=_project_filter(query))
    listing = ResourceList("secrets", query, str(org_id), str(call.principal.id), *filter_parts(query))
    rows = await secret_access.list_secrets(call.context.deps, call.principal, org_id, wanted, listing.order)
    if not isinstance(query.mcp_oauth_flow_id, UnsetType):
        # Secrets of this release are made by hand, none by an authorization flow.
        rows = []
    data = [secret(row) for _, row in listing.page(rows)]
    return reply(200, ListSecretsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def get_secret(call: Call) -> web.StreamResponse:
    """One secret."""
    row = await org_secrets.get_secret(call.context.deps, call.principal, call.ids["orgID"], call.ids["secretID"])
    return reply(200, secret(row))


async def update_secret(call: Call) -> web.StreamResponse:
    """Another name or other metadata."""
    body: UpdateSecretRequest = call.body
    row = await org_secrets.update_secret(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["secretID"],
        given(body.name),
        given(body.metadata),
    )
    return reply(200, secret(row))


async def delete_secret(call: Call) -> web.StreamResponse:
    """The end of a secret and of its values."""
    await org_secrets.delete_secret(call.context.deps, call.principal, call.ids["orgID"], call.ids["secretID"])
    return no_content()


async def create_version(call: Call) -> web.StreamResponse:
    """Another value."""
    body: SecretVersionRequest = call.body
    row = await org_secrets.add_version(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["secretID"], _value(body.material)
    )
    return reply(200, secret(row))


# --- parts ------------------------------------------------------------------------------------------------


def secret_filter(query: Any, *, owner_project_id: UUID | None = None, source: str | None = None) -> SecretFilter:
    """The filters that the lists of secrets share."""
    return SecretFilter(
        kind=given(query.kind),
        owner_kind=given(query.owner_kind),
        owner_project_id=owner_project_id,
        source=source,
        metadata=given(query.metadata),
    )


def filter_parts(query: Any) -> list[str | None]:
    """The filters of a query, as a cursor is bound to them."""
    names = ("kind", "owner_kind", "owner_project_id", "mcp_oauth_flow_id", "availability_source")
    metadata = given(query.metadata)
    text = None if metadata is None else msgspec.json.encode(metadata, order="sorted").decode()
    return [*(given(getattr(query, name, UNSET)) for name in names), text]


def _project_filter(query: SecretsQuery) -> UUID | None:
    text = given(query.owner_project_id)
    if text is None:
        return None
    if given(query.owner_kind) not in (None, "project"):
        raise InvalidRequest("owner_project_id is only for secrets of projects")
    return id_in_body(IdKind.PROJECT, text)


def _owner_of(body: CreateSecretRequest) -> Owner:
    owner = body.owner
    match owner:
        case OrgSecretOwnerInput():
            return Owner("org")
        case UserSecretOwnerInput():
            return Owner("user")
        case ProjectSecretOwnerInput():
            return Owner("project", id_in_body(IdKind.PROJECT, owner.project_id))
        case _:
            assert_never(owner)


def _owner(row: SecretRow) -> OrgSecretOwner | ProjectSecretOwner | UserSecretOwner:
    if row.owner_project_id is not None:
        return ProjectSecretOwner(project_id=encode(IdKind.PROJECT, row.owner_project_id))
    if row.owner_user_id is not None:
        return UserSecretOwner(user_id=encode(IdKind.USER, row.owner_user_id))
    return OrgSecretOwner()


def _value(material: SecretMaterial) -> Value:
    if not isinstance(material, GenericSecretMaterial):
        raise Unprocessable("this release keeps generic secrets only")
    return Value(material.value)


ROUTES: Final = (
    Route(
        method="GET",
        path=SECRETS_PATH,
        operation_id="listSecrets",
        handler=list_secrets,
        path_ids=ORG,
        query=SecretsQuery,
        responses={200: ListSecretsResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="POST",
        path=SECRETS_PATH,
        operation_id="createSecret",
        handler=create_secret,
        path_ids=ORG,
        body=CreateSecretRequest,
        responses={201: Secret},
        errors=WRITE_ERRORS,
        further_errors=frozenset({422}),
    ),
    Route(
        method="GET",
        path=SECRET_PATH,
        operation_id="getSecret",
        handler=get_secret,
        path_ids=SECRET,
        responses={200: Secret},
        errors=READ_ERRORS,
    ),
    Route(
        method="PATCH",
        path=SECRET_PATH,
        operation_id="updateSecret",
        handler=update_secret,
        path_ids=SECRET,
        body=UpdateSecretRequest,
        responses={200: Secret},
        errors=WRITE_ERRORS,
    ),
    Route(
        method="DELETE",
        path=SECRET_PATH,
        operation_id="deleteSecret",
        handler=delete_secret,
        path_ids=SECRET,
        responses={204: None},
        errors=WRITE_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{SECRET_PATH}/versions",
        operation_id="createSecretVersion",
        handler=create_version,
        path_ids=SECRET,
        body=SecretVersionRequest,
        responses={200: Secret},
        errors=WRITE_ERRORS,
        further_errors=frozenset({422}),
    ),
)
