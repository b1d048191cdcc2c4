"""Routes that make, list and delete organizations and projects.

Who makes one gets a role in it, so this process forgets whom it remembers at once; others look again when a path leads
where a remembered caller had no role.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from omnara.access.roles import CallerRule
from omnara.api.cursors import Binding, Position
from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, PageQuery
from omnara.api.omnara.encode import agent as shown_agent
from omnara.api.omnara.encode import project as visible_project
from omnara.api.omnara.tools import time_key
from omnara.api.omnara.types.orgs import (
    CreateOrganizationRequest,
    CreateOrganizationResponse,
    CreateProjectRequest,
    ListedOrganization,
    ListOrganizationsResponse,
    Organization,
    OrganizationMembership,
    Project,
)
from omnara.api.omnara.types.overview import OrgOverviewResponse
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.accounts import ProjectRow
from omnara.db.orgs import MemberRow, OrgRow
from omnara.engine import orgs, projects
from omnara.ids import IdKind, encode

ORG = {"orgID": IdKind.ORG}
ORG_PATH = "/api/v1/orgs/{orgID}"


async def create_org(call: Call) -> web.StreamResponse:
    """A new organization, which the caller owns; a used Idempotency-Key returns the one that it made."""
    body: CreateOrganizationRequest = call.body
    made = await orgs.create_org(call.context.deps, call.principal, body.name, call.key)
    call.context.authenticator.forget()
    answer = CreateOrganizationResponse(
        org=_org(made.org), project=project(made.project), membership=membership(made.membership)
    )
    return reply(201 if made.created else 200, answer)


async def list_orgs(call: Call) -> web.StreamResponse:
    """A page of the caller's organizations, newest first."""
    query: PageQuery = call.query
    binding = Binding("orgs", (str(call.principal.id),))
    page = await orgs.list_orgs(call.context.deps, call.principal, after=time_key(binding, query), limit=query.limit)
    last = page.rows[-1].row if page.more else None
    data = [
        ListedOrganization(
            id=encode(IdKind.ORG, item.row.id),
            name=item.row.name,
            role=item.role,
            created_at=item.row.created_at,
            updated_at=item.row.updated_at,
        )
        for item in page.rows
    ]
    cursor = None if last is None else binding.encode(Position.at(last.created_at, last.id))
    return reply(200, ListOrganizationsResponse(data=data, next_cursor=cursor))


async def overview(call: Call) -> web.StreamResponse:
    """What a person sees first of an organization. This release has no agent profiles, so there are none."""
    found = await orgs.overview(call.context.deps, call.principal, call.ids["orgID"])
    answer = OrgOverviewResponse(
        projects=[visible_project(row, call.principal) for row in found.projects],
        recent_agents=[shown_agent(row) for row in found.agents],
        recent_agent_profiles=[],
    )
    return reply(200, answer)


async def delete_org(call: Call) -> web.StreamResponse:
    """The end of an organization and of everything in it."""
    await orgs.delete_org(call.context.deps, call.principal, call.ids["orgID"])
    call.context.authenticator.forget()
    return no_content()


async def create_project(call: Call) -> web.StreamResponse:
    """A new project, whose admin is the caller; a used Idempotency-Key returns the one that it made."""
    body: CreateProjectRequest = call.body
    made = await projects.create_project(call.context.deps, call.principal, call.ids["orgID"], body.name, call.key)
    call.context.authenticator.forget()
    return reply(201 if made.created else 200, project(made.row))


async def delete_project(call: Call) -> web.StreamResponse:
    """The end of a project; its agents are archived."""
    await projects.delete_project(call.context.deps, call.principal, call.ids["orgID"], call.ids["projectID"])
    call.context.authenticator.forget()
    return no_content()


def project(row: ProjectRow) -> Project:
    """A project."""
    return Project(
        id=encode(IdKind.PROJECT, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        name=row.name,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def membership(row: MemberRow) -> OrganizationMembership:
    """A user's role in an organization."""
    return OrganizationMembership(
        org_id=encode(IdKind.ORG, row.org_id),
        user_id=encode(IdKind.USER, row.user_id),
        role=row.role,
        created_at=row.created_at,
    )


def _org(row: OrgRow) -> Organization:
    return Organization(
        id=encode(IdKind.ORG, row.id), name=row.name, created_at=row.created_at, updated_at=row.updated_at
    )


ROUTES: Final = (
    Route(
        method="POST",
        path="/api/v1/orgs",
        operation_id="createOrganization",
        handler=create_org,
        body=CreateOrganizationRequest,
        idempotent=True,
        caller=CallerRule.USER,
        responses={200: CreateOrganizationResponse, 201: CreateOrganizationResponse},
    ),
    Route(
        method="GET",
        path="/api/v1/orgs",
        operation_id="listOrganizations",
        handler=list_orgs,
        query=PageQuery,
        responses={200: ListOrganizationsResponse},
        errors=frozenset({400, 401, 403, 503}),
    ),
    Route(
        method="GET",
        path=f"{ORG_PATH}/overview",
        operation_id="getOrgOverview",
        handler=overview,
        path_ids=ORG,
        responses={200: OrgOverviewResponse},
        errors=frozenset({401, 403, 404, 503}),
    ),
    Route(
        method="DELETE",
        path=ORG_PATH,
        operation_id="deleteOrganization",
        handler=delete_org,
        path_ids=ORG,
        responses={204: None},
    ),
    Route(
        method="POST",
        path=f"{ORG_PATH}/projects",
        operation_id="createProject",
        handler=create_project,
        path_ids=ORG,
        body=CreateProjectRequest,
        idempotent=True,
        responses={200: Project, 201: Project},
    ),
    Route(
        method="DELETE",
        path=PROJECT_PATH,
        operation_id="deleteProject",
        handler=delete_project,
        path_ids=PROJECT,
        responses={204: None},
    ),
)
