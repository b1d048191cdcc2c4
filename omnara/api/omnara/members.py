"""Routes of members and of roles in projects.

A changed role counts at once in this process; other processes follow within the second for which they remember callers.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.api.omnara.decode import project_scope
from omnara.api.omnara.orgs import ORG, ORG_PATH, membership
from omnara.api.omnara.resource_lists import CreatedQuery, ResourceList
from omnara.api.omnara.types.members import (
    ListOrgMembersResponse,
    ListProjectMembershipGrantsResponse,
    OrgMember,
    ProjectMembershipGrant,
    SetProjectMembershipRequest,
    UpdateOrgMemberRequest,
)
from omnara.api.omnara.types.orgs import OrganizationMembership
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.members import ProjectRoleRow
from omnara.engine import members
from omnara.ids import IdKind, encode

MEMBER = {**ORG, "userID": IdKind.USER}
MEMBERS_PATH = f"{ORG_PATH}/members"
MEMBER_PATH = f"{MEMBERS_PATH}/{{userID}}"
READ_ERRORS = frozenset({400, 401, 403, 404, 503})


async def list_members(call: Call) -> web.StreamResponse:
    """A page of members."""
    query: CreatedQuery = call.query
    org_id = call.ids["orgID"]
    listing = ResourceList("members", query, str(org_id))
    rows = await members.list_members(call.context.deps, call.principal, org_id, listing.order)
    data = [
        OrgMember(
            user_id=encode(IdKind.USER, row.id),
            email=row.email,
            display_name=row.name,
            role=row.role,
            created_at=row.created_at,
        )
        for _, row in listing.page(rows)
    ]
    return reply(200, ListOrgMembersResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def update_member(call: Call) -> web.StreamResponse:
    """Another role in the organization."""
    body: UpdateOrgMemberRequest = call.body
    row = await members.set_role(call.context.deps, call.principal, call.ids["orgID"], call.ids["userID"], body.role)
    call.context.authenticator.forget()
    return reply(200, membership(row))


async def remove_member(call: Call) -> web.StreamResponse:
    """The end of a membership."""
    await members.remove_member(call.context.deps, call.principal, call.ids["orgID"], call.ids["userID"])
    call.context.authenticator.forget()
    return no_content()


async def list_projects(call: Call) -> web.StreamResponse:
    """A member's roles in projects."""
    return await list_roles(call, "userID", user=True)


async def set_project(call: Call) -> web.StreamResponse:
    """A member's role in a project."""
    return await set_role(call, "userID", user=True)


async def remove_project(call: Call) -> web.StreamResponse:
    """The end of a member's role in a project."""
    return await remove_role(call, "userID", user=True)


async def list_roles(call: Call, holder: str, *, user: bool) -> web.StreamResponse:
    """Roles in projects of the member or the key whose id the path has under `holder`."""
    rows = await members.list_project_roles(
        call.context.deps, call.principal, call.ids["orgID"], call.ids[holder], user=user
    )
    return reply(200, ListProjectMembershipGrantsResponse(data=[_grant(row) for row in rows]))


async def set_role(call: Call, holder: str, *, user: bool) -> web.StreamResponse:
    """A role in a project, for a member or a key."""
    body: SetProjectMembershipRequest = call.body
    row = await members.set_project_role(
        call.context.deps, call.principal, project_scope(call), call.ids[holder], body.role, user=user
    )
    call.context.authenticator.forget()
    return reply(200, _grant(row))


async def remove_role(call: Call, holder: str, *, user: bool) -> web.StreamResponse:
    """The end of a role in a project, for a member or a key."""
    await members.remove_project_role(
        call.context.deps, call.principal, project_scope(call), call.ids[holder], user=user
    )
    call.context.authenticator.forget()
    return no_content()


def _grant(row: ProjectRoleRow) -> ProjectMembershipGrant:
    return ProjectMembershipGrant(
        project_id=encode(IdKind.PROJECT, row.project_id),
        project_name=row.project_name,
        role=row.role,
        created_at=row.created_at,
    )


ROUTES: Final = (
    Route(
        method="GET",
        path=MEMBERS_PATH,
        operation_id="listOrgMembers",
        handler=list_members,
        path_ids=ORG,
        query=CreatedQuery,
        responses={200: ListOrgMembersResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="PATCH",
        path=MEMBER_PATH,
        operation_id="updateOrgMember",
        handler=update_member,
        path_ids=MEMBER,
        body=UpdateOrgMemberRequest,
        responses={200: OrganizationMembership},
    ),
    Route(
        method="DELETE",
        path=MEMBER_PATH,
        operation_id="removeOrgMember",
        handler=remove_member,
        path_ids=MEMBER,
        responses={204: None},
    ),
    Route(
        method="GET",
        path=f"{MEMBER_PATH}/projects",
        operation_id="listMemberProjectAccess",
        handler=list_projects,
        path_ids=MEMBER,
        responses={200: ListProjectMembershipGrantsResponse},
        errors=READ_ERRORS,
    ),
    Route(
        method="PUT",
        path=f"{MEMBER_PATH}/projects/{{projectID}}",
        operation_id="setMemberProjectAccess",
        handler=set_project,
        path_ids={**MEMBER, "projectID": IdKind.PROJECT},
        body=SetProjectMembershipRequest,
        responses={200: ProjectMembershipGrant},
    ),
    Route(
        method="DELETE",
        path=f"{MEMBER_PATH}/projects/{{projectID}}",
        operation_id="removeMemberProjectAccess",
        handler=remove_project,
        path_ids={**MEMBER, "projectID": IdKind.PROJECT},
        responses={204: None},
        errors=READ_ERRORS,
    ),
)
