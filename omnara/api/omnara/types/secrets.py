"""Secrets as they arrive and as they are shown: what arrives has a value, what is shown has none.

Objects that hold a value print none of it, wherever they end up.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.orgs import Project
from omnara.api.omnara.types.scalars import (
    Int32,
    Metadata,
    NonEmpty,
    OrganizationID,
    ProjectID,
    SecretGrantID,
    SecretID,
    Timestamp,
    UserID,
    Wire,
)
from omnara.api.types import Changes

SecretKind = Literal["generic", "oauth_token_set", "slack_app_credentials", "aws_credentials"]
ManagementKind = Literal["tenant", "cluster"]
URI = Annotated[str, Meta(min_length=1, extra_json_schema={"format": "uri"})]


class _Hidden(Wire, frozen=True, kw_only=True):
    """Base of objects with plaintext."""

    def __repr__(self) -> str:
        """Show the type only."""
        return f"{type(self).__name__}(…)"


class GenericSecretMaterial(_Hidden, frozen=True, kw_only=True, tag="generic", tag_field="kind"):
    """One value."""

    value: NonEmpty


class OAuthRefreshSecretMaterial(_Hidden, frozen=True, kw_only=True):
    """How a token set is renewed."""

    refresh_token: NonEmpty
    token_endpoint: URI
    client_id: NonEmpty
    client_secret: NonEmpty | UnsetType = UNSET
    resource: NonEmpty


class OAuthTokenSetSecretMaterial(_Hidden, frozen=True, kw_only=True, tag="oauth_token_set", tag_field="kind"):
    """Tokens of an authorization."""

    access_token: NonEmpty
    token_type: NonEmpty | UnsetType = UNSET
    id_token: NonEmpty | UnsetType = UNSET
    scopes: NonEmpty | UnsetType = UNSET
    mcp_url: NonEmpty | UnsetType = UNSET
    access_token_expires_in_seconds: (
        Annotated[int, Meta(ge=1, le=2147483647, extra_json_schema={"format": "int32"})] | UnsetType
    ) = UNSET
    refresh: OAuthRefreshSecretMaterial | UnsetType = UNSET


class AWSCredentialsSecretMaterial(_Hidden, frozen=True, kw_only=True, tag="aws_credentials", tag_field="kind"):
    """An access key, or what a role is assumed with."""

    access_key_id: NonEmpty
    secret_access_key: NonEmpty
    session_token: NonEmpty | UnsetType = UNSET
    role_arn: NonEmpty | UnsetType = UNSET
    external_id: NonEmpty | UnsetType = UNSET


SecretMaterial = GenericSecretMaterial | OAuthTokenSetSecretMaterial | AWSCredentialsSecretMaterial


class OrgSecretOwnerInput(Wire, frozen=True, kw_only=True, tag="org", tag_field="kind"):
    """The organization in the path."""


class ProjectSecretOwnerInput(Wire, frozen=True, kw_only=True, tag="project", tag_field="kind"):
    """A project of it."""

    project_id: ProjectID


class UserSecretOwnerInput(Wire, frozen=True, kw_only=True, tag="user", tag_field="kind"):
    """The caller."""


class OrgSecretOwner(Wire, frozen=True, kw_only=True, tag="org", tag_field="kind"):
    """The organization."""


class ProjectSecretOwner(Wire, frozen=True, kw_only=True, tag="project", tag_field="kind"):
    """A project."""

    project_id: ProjectID


class UserSecretOwner(Wire, frozen=True, kw_only=True, tag="user", tag_field="kind"):
    """A user."""

    user_id: UserID


class CreateSecretRequest(_Hidden, frozen=True, kw_only=True):
    """A new secret."""

    owner: OrgSecretOwnerInput | ProjectSecretOwnerInput | UserSecretOwnerInput
    name: NonEmpty
    metadata: Metadata | UnsetType = UNSET
    material: SecretMaterial


class UpdateSecretRequest(Changes, frozen=True, kw_only=True):
    """What is to change of a secret, except its value."""

    name: NonEmpty | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET


class SecretVersionRequest(_Hidden, frozen=True, kw_only=True):
    """A new value."""

    material: SecretMaterial


class Secret(Wire, frozen=True, kw_only=True):
    """A secret without its value."""

    id: SecretID
    org_id: OrganizationID
    management_kind: ManagementKind
    owner: OrgSecretOwner | ProjectSecretOwner | UserSecretOwner
    name: str
    kind: SecretKind
    metadata: Metadata
    current_version_number: Int32
    payload_keys: list[str]
    created_at: Timestamp
    updated_at: Timestamp


class ListSecretsResponse(Wire, frozen=True, kw_only=True):
    """A page of secrets."""

    data: list[Secret]
    next_cursor: str | None


class SecretGrantCreateRequest(Wire, frozen=True, kw_only=True):
    """Which project is to use the secret."""

    target_project_id: ProjectID


class SecretGrant(Wire, frozen=True, kw_only=True):
    """A project's right to use a secret."""

    id: SecretGrantID
    org_id: OrganizationID
    secret_id: SecretID
    target_project_id: ProjectID
    created_at: Timestamp


class SecretGrantListItem(Wire, frozen=True, kw_only=True):
    """A grant and its project."""

    grant: SecretGrant
    target_project: Project


class ListSecretGrantsResponse(Wire, frozen=True, kw_only=True):
    """A page of grants."""

    data: list[SecretGrantListItem]
    next_cursor: str | None


class DirectSecretAvailability(Wire, frozen=True, kw_only=True, tag="direct", tag_field="source"):
    """The secret is the project's own."""

    project_id: ProjectID


class GrantedSecretAvailability(Wire, frozen=True, kw_only=True, tag="grant", tag_field="source"):
    """The secret was granted to the project."""

    project_id: ProjectID
    grant_id: SecretGrantID


class ProjectSecretAccess(Wire, frozen=True, kw_only=True):
    """A secret that a project may use, and why."""

    secret: Secret
    availability: DirectSecretAvailability | GrantedSecretAvailability


class ListProjectSecretAccessesResponse(Wire, frozen=True, kw_only=True):
    """A page of what a project may use."""

    data: list[ProjectSecretAccess]
    next_cursor: str | None
