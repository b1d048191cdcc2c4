"""Routes of model grants: what a project may use, and within which limits."""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web
from msgspec import UNSET

from omnara.access.roles import CallerRule
from omnara.api.omnara.configured_models import stated
from omnara.api.omnara.decode import PROJECT, PROJECT_PATH, id_in_body, project_scope
from omnara.api.omnara.encode import some
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.models import (
    ConfiguredModelSummary,
    CreateProjectModelGrantRequest,
    ListProjectModelGrantsResponse,
    ProjectModelGrant,
    ProjectModelGrantEnvelope,
    ProjectModelGrantListItem,
    UpdateProjectModelGrantRequest,
)
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.model_grants import GrantedModelRow, GrantLimits, ModelGrantRow
from omnara.engine import model_grants
from omnara.ids import IdKind, encode

GRANTS_PATH = f"{PROJECT_PATH}/model-grants"
GRANT_PATH = f"{GRANTS_PATH}/{{modelGrantID}}"
GRANT = {**PROJECT, "modelGrantID": IdKind.MODEL_GRANT}


async def create_grant(call: Call) -> web.StreamResponse:
    """The right of a project to use a model; 200 for the same limits again."""
    body: CreateProjectModelGrantRequest = call.body
    limits = _limits(body)
    del limits["configured_model_id"]
    made = await model_grants.create_grant(
        call.context.deps,
        call.principal,
        project_scope(call),
        id_in_body(IdKind.CONFIGURED_MODEL, body.configured_model_id),
        GrantLimits(**limits),
    )
    return reply(201 if made.created else 200, _envelope(call, made.row))


async def list_grants(call: Call) -> web.StreamResponse:
    """A page of what a project may use."""
    query: ResourceQuery = call.query
    scope = project_scope(call)
    listing = ResourceList("model_grants", query, str(scope.project_id))
    rows = await model_grants.list_grants(call.context.deps, call.principal, scope, listing.order)
    data = [
        ProjectModelGrantListItem(grant=_grant(call, found.row), model=_summary(found.row, found.model))
        for _, found in listing.page(rows)
    ]
    return reply(200, ListProjectModelGrantsResponse(data=data, next_cursor=listing.next_cursor(rows)))


async def update_grant(call: Call) -> web.StreamResponse:
    """Other limits."""
    body: UpdateProjectModelGrantRequest = call.body
    row = await model_grants.update_grant(
        call.context.deps, call.principal, project_scope(call), call.ids["modelGrantID"], _limits(body)
    )
    return reply(200, _envelope(call, row))


async def delete_grant(call: Call) -> web.StreamResponse:
    """The end of the right."""
    await model_grants.delete_grant(call.context.deps, call.principal, project_scope(call), call.ids["modelGrantID"])
    return no_content()


def _limits(body: CreateProjectModelGrantRequest | UpdateProjectModelGrantRequest) -> dict[str, Any]:
    limits = stated(body)
    if limits.get("default_reasoning_effort") == "":
        limits["default_reasoning_effort"] = None
    return limits


def _envelope(call: Call, row: ModelGrantRow) -> ProjectModelGrantEnvelope:
    return ProjectModelGrantEnvelope(grant=_grant(call, row))


def _grant(call: Call, row: ModelGrantRow) -> ProjectModelGrant:
    limits = row.limits
    retention: Any = UNSET if limits.default_cache_retention is None else limits.default_cache_retention
    return ProjectModelGrant(
        id=encode(IdKind.MODEL_GRANT, row.id),
        org_id=encode(IdKind.ORG, call.ids["orgID"]),
        project_id=encode(IdKind.PROJECT, row.project_id),
        configured_model_id=encode(IdKind.CONFIGURED_MODEL, row.configured_model_id),
        context_window_tokens=limits.context_window_tokens,
        max_output_tokens=limits.max_output_tokens,
        default_max_output_tokens=limits.default_max_output_tokens,
        default_cache_retention=retention,
        supports_tools=limits.supports_tools,
        supports_reasoning=limits.supports_reasoning,
        default_reasoning_effort=some(limits.default_reasoning_effort),
        supported_reasoning_efforts=list(limits.supported_reasoning_efforts),
        input_modalities=list(limits.input_modalities),
        output_modalities=list(limits.output_modalities),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _summary(grant: ModelGrantRow, model: GrantedModelRow) -> ConfiguredModelSummary:
    return ConfiguredModelSummary(
        id=encode(IdKind.CONFIGURED_MODEL, grant.configured_model_id),
        org_id=encode(IdKind.ORG, model.org_id),
        model_provider_config_id=encode(IdKind.PROVIDER_CONFIG, model.provider_config_id),
        name=model.name,
        provider_config=model.provider_config,
        created_at=model.created_at,
        updated_at=model.updated_at,
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=GRANTS_PATH,
        operation_id="createProjectModelGrant",
        handler=create_grant,
        path_ids=PROJECT,
        body=CreateProjectModelGrantRequest,
        caller=CallerRule.USER,
        responses={200: ProjectModelGrantEnvelope, 201: ProjectModelGrantEnvelope},
    ),
    Route(
        method="GET",
        path=GRANTS_PATH,
        operation_id="listProjectModelGrants",
        handler=list_grants,
        path_ids=PROJECT,
        query=ResourceQuery,
        responses={200: ListProjectModelGrantsResponse},
    ),
    Route(
        method="PATCH",
        path=GRANT_PATH,
        operation_id="updateProjectModelGrant",
        handler=update_grant,
        path_ids=GRANT,
        body=UpdateProjectModelGrantRequest,
        responses={200: ProjectModelGrantEnvelope},
    ),
    Route(
        method="DELETE",
        path=GRANT_PATH,
        operation_id="deleteProjectModelGrant",
        handler=delete_grant,
        path_ids=GRANT,
        responses={204: None},
    ),
)
