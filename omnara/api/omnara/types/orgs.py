"""Organizations and projects as they are made and shown."""

from __future__ import annotations

from omnara.api.omnara.types.scalars import NonEmpty, OrganizationID, ProjectID, Timestamp, UserID, Wire


class CreateOrganizationRequest(Wire, frozen=True, kw_only=True):
    """A new organization."""

    name: NonEmpty


class Organization(Wire, frozen=True, kw_only=True):
    """An organization."""

    id: OrganizationID
    name: str
    created_at: Timestamp
    updated_at: Timestamp


class OrganizationMembership(Wire, frozen=True, kw_only=True):
    """A user's role in an organization."""

    org_id: OrganizationID
    user_id: UserID
    role: str
    created_at: Timestamp


class Project(Wire, frozen=True, kw_only=True):
    """A project."""

    id: ProjectID
    org_id: OrganizationID
    name: str
    created_at: Timestamp
    updated_at: Timestamp


class CreateOrganizationResponse(Wire, frozen=True, kw_only=True):
    """An organization with its first project and the caller's membership."""

    org: Organization
    project: Project
    membership: OrganizationMembership


class ListedOrganization(Wire, frozen=True, kw_only=True):
    """An organization with the caller's role in it."""

    id: OrganizationID
    name: str
    role: str
    created_at: Timestamp
    updated_at: Timestamp


class ListOrganizationsResponse(Wire, frozen=True, kw_only=True):
    """A page of organizations, newest first."""

    data: list[ListedOrganization]
    next_cursor: str | None


class CreateProjectRequest(Wire, frozen=True, kw_only=True):
    """A new project."""

    name: NonEmpty
