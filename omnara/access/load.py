"""From the rows of one query to a `Principal`: the only place that reads stored roles.

Pure: `engine.authenticate` runs the query, so that this layer stays free of the database.
Source: api.md §3.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from omnara.access.principals import Credential, OrgRole, Principal, PrincipalKind, ProjectGrant, ProjectRole

__all__ = ["principal"]


def principal(
    credential: Credential,
    holder_id: UUID,
    *,
    key_id: UUID,
    display_name: str,
    orgs: Sequence[tuple[UUID, str]],
    projects: Sequence[tuple[UUID, UUID, str]],
) -> Principal:
    """Build a principal from (organization, role) and (project, organization, role) rows, oldest first.

    The default project is the oldest in which the caller may launch agents, else the oldest that it sees.
    Raises ValueError for a role that this release does not know, or an owner's role on an organization key.
    """
    kind = PrincipalKind.ORG_KEY if credential is Credential.ORG_KEY else PrincipalKind.USER
    grants = {project_id: ProjectGrant(org_id, ProjectRole(role)) for project_id, org_id, role in projects}
    default = next((pid for pid, grant in grants.items() if grant.role is not ProjectRole.VIEWER), None)
    if default is None:
        default = next(iter(grants), None)
    org_roles = {org_id: OrgRole(role) for org_id, role in orgs}
    default_org = grants[default].org_id if default is not None else next(iter(org_roles), None)
    return Principal(
        kind=kind,
        credential=credential,
        id=holder_id,
        org_roles=org_roles,
        project_grants=grants,
        default_org_id=default_org,
        default_project_id=default,
        display_name=display_name or None,
        key_id=key_id,
    )
