"""Who is calling: the facts about a caller that every permission rule needs, and nothing about storage.

A principal is loaded once per request (elsewhere) and then decided upon by pure functions in `roles`.
Source: api.md §3, §10 (actors).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from omnara import ids
from omnara.ids import IdKind

__all__ = [
    "ACTOR_PROVIDER",
    "ActorIdentity",
    "Credential",
    "OrgRole",
    "Principal",
    "PrincipalKind",
    "ProjectGrant",
    "ProjectRole",
]

ACTOR_PROVIDER: Final = "omnara"
"""The actor provider of our own users and keys. Source: api.md §10."""


class PrincipalKind(StrEnum):
    """A person, or an organization's API key."""

    USER = "user"
    ORG_KEY = "org_key"


class Credential(StrEnum):
    """How the caller proved it. Some operations need the person at a browser. Source: api.md §3."""

    SESSION = "session"
    PERSONAL_TOKEN = "personal_token"  # noqa: S105 - a kind of credential
    ORG_KEY = "org_key"


class OrgRole(StrEnum):
    """Roles in an organization, each including the next. Org keys are never owners. Source: api.md §3."""

    OWNER = "owner"
    ADMIN = "admin"
    MEMBER = "member"


class ProjectRole(StrEnum):
    """Roles in one project. Source: api.md §3."""

    ADMIN = "admin"
    DEVELOPER = "developer"
    OPERATOR = "operator"
    VIEWER = "viewer"


class ProjectGrant(msgspec.Struct, frozen=True):
    """A role in a project, given or implied by one in its organization, which the project belongs to."""

    org_id: UUID
    role: ProjectRole


class ActorIdentity(msgspec.Struct, frozen=True):
    """The actor to whom a caller's inputs and answers are attributed. Source: api.md §10."""

    provider: str
    provider_tenant_id: str
    provider_user_id: str
    display_name: str | None = None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated caller. `id` is that of the user or of the org API key.

    `default_project_id` is where requests without a project in their path go; `key_id` is the row of the
    credential used (token, session or key), for `last_used_at` and logs.
    """

    kind: PrincipalKind
    credential: Credential
    id: UUID
    org_roles: Mapping[UUID, OrgRole]
    project_grants: Mapping[UUID, ProjectGrant]
    default_org_id: UUID | None = None
    default_project_id: UUID | None = None
    display_name: str | None = None
    key_id: UUID | None = None

    def __post_init__(self) -> None:
        """Refuse combinations that no credential can prove. Raises ValueError."""
        if (self.kind is PrincipalKind.ORG_KEY) is not (self.credential is Credential.ORG_KEY):
            raise ValueError("an org key authenticates only itself")
        if self.kind is PrincipalKind.ORG_KEY and OrgRole.OWNER in self.org_roles.values():
            raise ValueError("an org key is never an owner")

    @property
    def public_id(self) -> str:
        """The caller's public id (`usr_…` or `oak_…`)."""
        return ids.encode(IdKind.USER if self.kind is PrincipalKind.USER else IdKind.ORG_API_KEY, self.id)

    @property
    def may_name_actor(self) -> bool:
        """Whether requests may carry an `actor`; a user's may not (400). Source: api.md §10."""
        return self.kind is PrincipalKind.ORG_KEY

    def actor(self, org_id: UUID) -> ActorIdentity:
        """Return the actor for what this caller does in `org_id`. Source: api.md §10."""
        return ActorIdentity(ACTOR_PROVIDER, ids.encode(IdKind.ORG, org_id), self.public_id, self.display_name)
