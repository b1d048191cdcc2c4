"""Routes of what projects may use of the secrets: grants, and a project's own view."""

from __future__ import annotations

from typing import Final, Literal

from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.access.roles import ProjectScope
from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, given, id_in_body, project_scope
from omnara.api.omnara.orgs import project
from omnara.api.omnara.resource_lists import CreatedQuery, ResourceList, ResourceQuery
from omnara.api.omnara.secrets import (
    READ_ERRORS,
    SECRET,
    SECRET_PATH,
    WRITE_ERRORS,
    filter_parts,
    secret,
    secret_filter,
)
from omnara.api.omnara.types.secrets import (
    DirectSecretAvailability,
    GrantedSecretAvailability,
    ListProjectSecretAccessesResponse,
    ListSecretGrantsResponse,
    ProjectSecretAccess,
    SecretGrant,
    SecretGrantCreateRequest,
    SecretGrantListItem,
    SecretKind,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.owned_secrets import SecretGrantRow
from omnara.engine import secret_access
from omnara.engine.org_secrets import OwnerKind
from omnara.engine.secret_access import AvailableSecret
from omnara.ids import IdKind, encode


class AvailableQuery(ResourceQuery, frozen=True, kw_only=True):
    """Which of a project's secrets to list."""

    kind: SecretKind | UnsetType = UNSET
    owner_kind: OwnerKind | UnsetType = UNSET
    availability_source: Literal["direct", "grant"] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


async def list_available(call: Call) -> web.StreamResponse:
    """A page of the secrets that a project may use."""
    query: AvailableQuery = call.query
    scope = project_scope(call)
    listing = ResourceList("available_secrets", query, str(scope.project_id), *filter_parts(query))
    wanted = secret_filter(query, source=given(query.availability_source))
    rows = await secret_access.list_available(call.context.deps, call.principal, scope, wanted, listing.order)
    data = [_access(found, scope) for _, found in listing.page(rows)]
    return reply(200, ListProjectSecretAccessesResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def get_available(call: Call) -> web.StreamResponse:
    """One secret that a project may use."""
    scope = project_scope(call)
    found = await secret_access.get_available(call.context.deps, call.principal, scope, call.ids["secretID"])
    return reply(200, _access(found, scope))


async def list_grants(call: Call) -> web.StreamResponse:
    """A page of the projects that may use a secret."""
    query: CreatedQuery = call.query
    secret_id = call.ids["secretID"]
    listing = ResourceList("secret_grants", query, str(secret_id))
    rows = await secret_access.list_grants(
        call.context.deps, call.principal, call.ids["orgID"], secret_id, listing.order
    )
    data = [
        SecretGrantListItem(grant=_grant(call, found.row), target_project=project(found.project))
        for _, found in listing.page(rows)
    ]
    return reply(200, ListSecretGrantsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def create_grant(call: Call) -> web.StreamResponse:
    """The right of a project to use a secret."""
    body: SecretGrantCreateRequest = call.body
    made = await secret_access.create_grant(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["secretID"],
        id_in_body(IdKind.PROJECT, body.target_project_id),
    )
    return reply(201, _grant(call, made))


async def delete_grant(call: Call) -> web.StreamResponse:
    """The end of such a right."""
    await secret_access.delete_grant(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["secretID"], call.ids["grantID"]
    )
    return no_content()


def _grant(call: Call, row: SecretGrantRow) -> SecretGrant:
    return SecretGrant(
        id=encode(IdKind.SECRET_GRANT, row.id),
        org_id=encode(IdKind.ORG, call.ids["orgID"]),
        secret_id=encode(IdKind.SECRET, row.secret_id),
        target_project_id=encode(IdKind.PROJECT, row.project_id),
        created_at=row.created_at,
    )


def _access(found: AvailableSecret, scope: ProjectScope) -> ProjectSecretAccess:
    project_id = encode(IdKind.PROJECT, scope.project_id)
    availability: DirectSecretAvailability | GrantedSecretAvailability
    if found.grant_id is None:
        availability = DirectSecretAvailability(project_id=project_id)
    else:
        availability = GrantedSecretAvailability(
            project_id=project_id, grant_id=encode(IdKind.SECRET_GRANT, found.grant_id)
        )
    return ProjectSecretAccess(secret=secret(found.row), availability=availability)


ROUTES: Final = (
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/secrets",
        operation_id="listProjectAvailableSecrets",
        handler=list_available,
        path_ids=PROJECT,
        query=AvailableQuery,
        responses={200: ListProjectSecretAccessesResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{PROJECT_PATH}/secrets/{{secretID}}",
        operation_id="getProjectAvailableSecret",
        handler=get_available,
        path_ids={**PROJECT, "secretID": IdKind.SECRET},
        responses={200: ProjectSecretAccess},
        errors=READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{SECRET_PATH}/grants",
        operation_id="listSecretGrants",
        handler=list_grants,
        path_ids=SECRET,
        query=CreatedQuery,
        responses={200: ListSecretGrantsResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{SECRET_PATH}/grants",
        operation_id="createSecretGrant",
        handler=create_grant,
        path_ids=SECRET,
        body=SecretGrantCreateRequest,
        responses={201: SecretGrant},
        errors=WRITE_ERRORS,
    ),
    Route(
        method="DELETE",
        path=f"{SECRET_PATH}/grants/{{grantID}}",
        operation_id="deleteSecretGrant",
        handler=delete_grant,
        path_ids={**SECRET, "grantID": IdKind.SECRET_GRANT},
        responses={204: None},
        errors=READ_ERRORS,
    ),
)
