"""Members, keys and tokens as they are shown; a token's text appears once, in the answer that made it."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from omnara.api.omnara.types.scalars import (
    NonEmpty,
    OrganizationID,
    OrgAPIKeyID,
    PersonalAccessTokenID,
    ProjectID,
    Timestamp,
    UserID,
    Wire,
)
from omnara.api.types import Changes

OrgAPIKeyRole = Literal["admin", "member"]


class OrgMember(Wire, frozen=True, kw_only=True):
    """A member of an organization."""

    user_id: UserID
    email: str
    display_name: str
    role: str
    created_at: Timestamp


class ListOrgMembersResponse(Wire, frozen=True, kw_only=True):
    """A page of members."""

    data: list[OrgMember]
    next_cursor: str | None


class UpdateOrgMemberRequest(Wire, frozen=True, kw_only=True):
    """Another role in the organization."""

    role: str


class SetProjectMembershipRequest(Wire, frozen=True, kw_only=True):
    """A role in a project."""

    role: str


class ProjectMembershipGrant(Wire, frozen=True, kw_only=True):
    """A role in a project."""

    project_id: ProjectID
    project_name: str
    role: str
    created_at: Timestamp


class ListProjectMembershipGrantsResponse(Wire, frozen=True, kw_only=True):
    """All roles in projects, by project name."""

    data: list[ProjectMembershipGrant]


class OrgAPIKey(Wire, frozen=True, kw_only=True):
    """A key of an organization."""

    id: OrgAPIKeyID
    org_id: OrganizationID
    name: str
    token_id: str
    org_role: str
    created_by_user_id: UserID
    created_at: Timestamp
    updated_at: Timestamp
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


class ListOrgAPIKeysResponse(Wire, frozen=True, kw_only=True):
    """A page of keys, newest first."""

    data: list[OrgAPIKey]
    next_cursor: str | None


class CreateOrgAPIKeyRequest(Wire, frozen=True, kw_only=True):
    """A new key."""

    name: NonEmpty
    org_role: OrgAPIKeyRole


class CreateOrgAPIKeyResponse(Wire, frozen=True, kw_only=True):
    """A new key and its token."""

    token: NonEmpty
    api_key: OrgAPIKey


class UpdateOrgAPIKeyRequest(Changes, frozen=True, kw_only=True):
    """What is to change of a key."""

    name: NonEmpty | UnsetType = UNSET
    org_role: OrgAPIKeyRole | UnsetType = UNSET


class PersonalAccessToken(Wire, frozen=True, kw_only=True):
    """A personal token without its text."""

    id: PersonalAccessTokenID
    user_id: UserID
    name: str
    token_id: str
    created_at: Timestamp
    last_used_at: Timestamp | None
    revoked_at: Timestamp | None


class ListPersonalAccessTokensResponse(Wire, frozen=True, kw_only=True):
    """A page of tokens, newest first."""

    data: list[PersonalAccessToken]
    next_cursor: str | None


class CreatePersonalAccessTokenRequest(Wire, frozen=True, kw_only=True):
    """A new token."""

    name: NonEmpty


class CreatePersonalAccessTokenResponse(Wire, frozen=True, kw_only=True):
    """A new token and its text."""

    token: NonEmpty
    token_record: PersonalAccessToken
