"""Routes of organization keys and personal tokens. To make, change or revoke a key takes a person at a browser."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.access.roles import CallerRule
from omnara.api.cursors import Binding
from omnara.api.omnara import members
from omnara.api.omnara.decode import PageQuery, given
from omnara.api.omnara.orgs import ORG, ORG_PATH
from omnara.api.omnara.tools import next_cursor, time_key
from omnara.api.omnara.types.members import (
    CreateOrgAPIKeyRequest,
    CreateOrgAPIKeyResponse,
    CreatePersonalAccessTokenRequest,
    CreatePersonalAccessTokenResponse,
    ListOrgAPIKeysResponse,
    ListPersonalAccessTokensResponse,
    ListProjectMembershipGrantsResponse,
    OrgAPIKey,
    PersonalAccessToken,
    ProjectMembershipGrant,
    SetProjectMembershipRequest,
    UpdateOrgAPIKeyRequest,
)
from omnara.api.routing import Call, Route, reply
from omnara.db.accounts import TokenRow
from omnara.db.credentials import OrgKeyRow
from omnara.engine import credentials
from omnara.ids import IdKind, encode

KEY = {**ORG, "keyID": IdKind.ORG_API_KEY}
KEY_PROJECT = {**KEY, "projectID": IdKind.PROJECT}
KEYS_PATH = f"{ORG_PATH}/api-keys"
KEY_PATH = f"{KEYS_PATH}/{{keyID}}"
TOKENS_PATH = "/api/v1/personal-access-tokens"
READ_ERRORS = members.READ_ERRORS


async def list_keys(call: Call) -> web.StreamResponse:
    """A page of an organization's keys, newest first."""
    query: PageQuery = call.query
    org_id = call.ids["orgID"]
    binding = Binding("org_api_keys", (str(org_id),))
    page = await credentials.list_keys(
        call.context.deps, call.principal, org_id, after=time_key(binding, query), limit=query.limit
    )
    cursor = next_cursor(binding, page.rows, more=page.more)
    return reply(200, ListOrgAPIKeysResponse(data=[_key(row) for row in page.rows], next_cursor=cursor))


async def get_key(call: Call) -> web.StreamResponse:
    """One key."""
    return reply(
        200,
        _key(await credentials.get_key(call.context.deps, call.principal, call.ids["orgID"], call.ids["keyID"])),
    )


async def create_key(call: Call) -> web.StreamResponse:
    """A new key with its token, which is shown this once."""
    body: CreateOrgAPIKeyRequest = call.body
    made = await credentials.create_key(call.context.deps, call.principal, call.ids["orgID"], body.name, body.org_role)
    return reply(201, CreateOrgAPIKeyResponse(token=made.token.text, api_key=_key(made.row)))


async def update_key(call: Call) -> web.StreamResponse:
    """Another name or role."""
    body: UpdateOrgAPIKeyRequest = call.body
    row = await credentials.update_key(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["keyID"],
        given(body.name),
        given(body.org_role),
    )
    call.context.authenticator.forget()
    return reply(200, _key(row))


async def revoke_key(call: Call) -> web.StreamResponse:
    """The end of a key."""
    row = await credentials.revoke_key(call.context.deps, call.principal, call.ids["orgID"], call.ids["keyID"])
    call.context.authenticator.forget()
    return reply(200, _key(row))


async def list_projects(call: Call) -> web.StreamResponse:
    """A key's roles in projects."""
    return await members.list_roles(call, "keyID", user=False)


async def set_project(call: Call) -> web.StreamResponse:
    """A key's role in a project."""
    return await members.set_role(call, "keyID", user=False)


async def remove_project(call: Call) -> web.StreamResponse:
    """The end of a key's role in a project."""
    return await members.remove_role(call, "keyID", user=False)


async def list_tokens(call: Call) -> web.StreamResponse:
    """A page of the caller's personal tokens, newest first."""
    query: PageQuery = call.query
    binding = Binding("personal_access_tokens", (str(call.principal.id),))
    page = await credentials.list_tokens(
        call.context.deps, call.principal, after=time_key(binding, query), limit=query.limit
    )
    cursor = next_cursor(binding, page.rows, more=page.more)
    return reply(200, ListPersonalAccessTokensResponse(data=[_token(row) for row in page.rows], next_cursor=cursor))


async def create_token(call: Call) -> web.StreamResponse:
    """A new personal token, whose text is shown this once."""
    body: CreatePersonalAccessTokenRequest = call.body
    made = await credentials.create_token(call.context.deps, call.principal, body.name)
    return reply(201, CreatePersonalAccessTokenResponse(token=made.token.text, token_record=_token(made.row)))


async def revoke_token(call: Call) -> web.StreamResponse:
    """The end of a personal token."""
    row = await credentials.revoke_token(call.context.deps, call.principal, call.ids["tokenID"])
    call.context.authenticator.forget()
    return reply(200, _token(row))


def _key(row: OrgKeyRow) -> OrgAPIKey:
    return OrgAPIKey(
        id=encode(IdKind.ORG_API_KEY, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        name=row.name,
        token_id=row.token_id,
        org_role=row.org_role,
        created_by_user_id=encode(IdKind.USER, row.created_by_user_id),
        created_at=row.created_at,
        updated_at=row.updated_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )


def _token(row: TokenRow) -> PersonalAccessToken:
    return PersonalAccessToken(
        id=encode(IdKind.PERSONAL_ACCESS_TOKEN, row.id),
        user_id=encode(IdKind.USER, row.user_id),
        name=row.name,
        token_id=row.token_id,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )


ROUTES: Final = (
    Route(
        method="GET",
        path=KEYS_PATH,
        operation_id="listOrgAPIKeys",
        handler=list_keys,
        path_ids=ORG,
        query=PageQuery,
        responses={200: ListOrgAPIKeysResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="POST",
        path=KEYS_PATH,
        operation_id="createOrgAPIKey",
        handler=create_key,
        path_ids=ORG,
        body=CreateOrgAPIKeyRequest,
        caller=CallerRule.SESSION,
        responses={201: CreateOrgAPIKeyResponse},
    ),
    Route(
        method="GET",
        path=KEY_PATH,
        operation_id="getOrgAPIKey",
        handler=get_key,
        path_ids=KEY,
        responses={200: OrgAPIKey},
        errors=READ_ERRORS,
    ),
    Route(
        method="PATCH",
        path=KEY_PATH,
        operation_id="updateOrgAPIKey",
        handler=update_key,
        path_ids=KEY,
        body=UpdateOrgAPIKeyRequest,
        caller=CallerRule.SESSION,
        responses={200: OrgAPIKey},
    ),
    Route(
        method="POST",
        path=f"{KEY_PATH}/revoke",
        operation_id="revokeOrgAPIKey",
        handler=revoke_key,
        path_ids=KEY,
        caller=CallerRule.SESSION,
        responses={200: OrgAPIKey},
        errors=READ_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{KEY_PATH}/projects",
        operation_id="listOrgAPIKeyProjectAccess",
        handler=list_projects,
        path_ids=KEY,
        responses={200: ListProjectMembershipGrantsResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="PUT",
        path=f"{KEY_PATH}/projects/{{projectID}}",
        operation_id="setOrgAPIKeyProjectRole",
        handler=set_project,
        path_ids=KEY_PROJECT,
        body=SetProjectMembershipRequest,
        caller=CallerRule.SESSION,
        responses={200: ProjectMembershipGrant},
    ),
    Route(
        method="DELETE",
        path=f"{KEY_PATH}/projects/{{projectID}}",
        operation_id="removeOrgAPIKeyProjectRole",
        handler=remove_project,
        path_ids=KEY_PROJECT,
        caller=CallerRule.SESSION,
        responses={204: None},
    ),
    Route(
        method="GET",
        path=TOKENS_PATH,
        operation_id="listPersonalAccessTokens",
        handler=list_tokens,
        query=PageQuery,
        caller=CallerRule.USER,
        responses={200: ListPersonalAccessTokensResponse},
        errors=frozenset({400, 401, 403, 503}),
    ),
    Route(
        method="POST",
        path=TOKENS_PATH,
        operation_id="createPersonalAccessToken",
        handler=create_token,
        body=CreatePersonalAccessTokenRequest,
        caller=CallerRule.SESSION,
        responses={201: CreatePersonalAccessTokenResponse},
    ),
    Route(
        method="POST",
        path=f"{TOKENS_PATH}/{{tokenID}}/revoke",
        operation_id="revokePersonalAccessToken",
        handler=revoke_token,
        path_ids={"tokenID": IdKind.PERSONAL_ACCESS_TOKEN},
        caller=CallerRule.USER,
        responses={200: PersonalAccessToken},
        errors=READ_ERRORS,
    ),
)
