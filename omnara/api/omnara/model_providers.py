"""Routes of provider configs and of what their endpoints offer."""

from __future__ import annotations

from typing import Any, Final, get_args

from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.omnara.decode import given, id_in_body
from omnara.api.omnara.encode import some
from omnara.api.omnara.orgs import ORG, ORG_PATH
from omnara.api.omnara.resource_lists import ResourceList, ResourceQuery
from omnara.api.omnara.types.models import (
    AuthOptions,
    CreateModelProviderConfigRequest,
    CreateModelProviderConfigResponse,
    DiscoveredProviderModel,
    ModelCatalog,
    ModelProviderConfig,
    ModelProviderConfigList,
    UpdateModelProviderConfigRequest,
)
from omnara.api.omnara.types.scalars import ModelAPIFormat
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.model_configs import ProviderConfigRow
from omnara.engine import model_discovery, model_providers
from omnara.engine.model_discovery import Discovered
from omnara.engine.provider_settings import Wishes, header_shown
from omnara.ids import IdKind, encode

PROVIDER = {**ORG, "modelProviderConfigID": IdKind.PROVIDER_CONFIG}
PROVIDERS_PATH = f"{ORG_PATH}/model-provider-configs"
PROVIDER_PATH = f"{PROVIDERS_PATH}/{{modelProviderConfigID}}"

_FORMATS: Final[dict[str, Any]] = {name.replace("-", "_"): name for name in get_args(ModelAPIFormat)}


def provider_config(row: ProviderConfigRow) -> ModelProviderConfig:
    """A provider config.

    One without a key names a secret that does not exist, since the contract knows none without.
    """
    header = header_shown(row.api_format, row.auth_kind, row.auth_header)
    auth_kind: Any = row.auth_kind
    return ModelProviderConfig(
        id=encode(IdKind.PROVIDER_CONFIG, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        management_kind="cluster" if row.origin == "environment" else "tenant",
        name=row.name,
        api_format=_FORMATS[row.api_format],
        api_variant=row.api_variant,
        base_url=row.base_url,
        endpoint_path=row.request_path,
        request_timeout_ms=row.request_timeout_ms,
        auth_kind=auth_kind,
        auth_options=AuthOptions(header_name=some(header)),
        credential_secret_id=encode(IdKind.SECRET, row.secret_id or row.id),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def model_catalog(offered: Discovered) -> ModelCatalog:
    """What a provider offers."""
    if offered.error is not None:
        return ModelCatalog(status="failed", error=offered.error)
    models = [
        DiscoveredProviderModel(
            slug=model.slug,
            display_name=some(model.display_name),
            context_window_tokens=some(model.context_window_tokens),
            max_output_tokens=some(model.max_output_tokens),
        )
        for model in offered.models
    ]
    return ModelCatalog(status="ok", models=models)


async def create_provider(call: Call) -> web.StreamResponse:
    """A new provider config, and at once what it offers; 200 for the same settings again."""
    body: CreateModelProviderConfigRequest = call.body
    api_format = given(body.api_format)
    made = await model_providers.create_provider(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        body.name,
        given(body.preset),
        _wishes(body, None if api_format is None else api_format.replace("-", "_"), given(body.api_variant)),
        id_in_body(IdKind.SECRET, body.credential_secret_id),
    )
    answer = CreateModelProviderConfigResponse(
        config=provider_config(made.row), model_catalog=model_catalog(made.offered)
    )
    return reply(201 if made.created else 200, answer)


async def list_providers(call: Call) -> web.StreamResponse:
    """A page of provider configs."""
    query: ResourceQuery = call.query
    org_id = call.ids["orgID"]
    listing = ResourceList("model_provider_configs", query, str(org_id))
    rows = await model_providers.list_providers(call.context.deps, call.principal, org_id, listing.order)
    data = [provider_config(row) for _, row in listing.page(rows)]
    return reply(200, ModelProviderConfigList(data=data, next_cursor=listing.next_cursor(rows)))


async def get_provider(call: Call) -> web.StreamResponse:
    """One provider config."""
    row = await model_providers.get_provider(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["modelProviderConfigID"]
    )
    return reply(200, provider_config(row))


async def update_provider(call: Call) -> web.StreamResponse:
    """Another endpoint or another key."""
    body: UpdateModelProviderConfigRequest = call.body
    secret = body.credential_secret_id
    row = await model_providers.update_provider(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["modelProviderConfigID"],
        _wishes(body, None, None),
        None if isinstance(secret, UnsetType) else id_in_body(IdKind.SECRET, secret),
    )
    return reply(200, provider_config(row))


async def delete_provider(call: Call) -> web.StreamResponse:
    """The end of a provider config."""
    await model_providers.delete_provider(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["modelProviderConfigID"]
    )
    return no_content()


async def get_catalog(call: Call) -> web.StreamResponse:
    """What the endpoint offers now."""
    offered = await model_discovery.discover(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["modelProviderConfigID"]
    )
    return reply(200, model_catalog(offered))


def _wishes(
    body: CreateModelProviderConfigRequest | UpdateModelProviderConfigRequest,
    api_format: str | None,
    api_variant: str | None,
) -> Wishes:
    options = body.auth_options
    header = UNSET if isinstance(options, UnsetType) else options.header_name
    return Wishes(
        api_format=api_format,
        api_variant=api_variant,
        base_url=given(body.base_url),
        request_path=given(body.endpoint_path),
        auth_kind=given(body.auth_kind),
        auth_header=given(header),
        header_given=not isinstance(options, UnsetType),
        request_timeout_ms=given(body.request_timeout_ms),
    )


ROUTES: Final = (
    Route(
        method="POST",
        path=PROVIDERS_PATH,
        operation_id="createModelProviderConfig",
        handler=create_provider,
        path_ids=ORG,
        body=CreateModelProviderConfigRequest,
        responses={200: CreateModelProviderConfigResponse, 201: CreateModelProviderConfigResponse},
    ),
    Route(
        method="GET",
        path=PROVIDERS_PATH,
        operation_id="listModelProviderConfigs",
        handler=list_providers,
        path_ids=ORG,
        query=ResourceQuery,
        responses={200: ModelProviderConfigList},
    ),
    Route(
        method="GET",
        path=PROVIDER_PATH,
        operation_id="getModelProviderConfig",
        handler=get_provider,
        path_ids=PROVIDER,
        responses={200: ModelProviderConfig},
    ),
    Route(
        method="PUT",
        path=PROVIDER_PATH,
        operation_id="updateModelProviderConfig",
        handler=update_provider,
        path_ids=PROVIDER,
        body=UpdateModelProviderConfigRequest,
        responses={200: ModelProviderConfig},
    ),
    Route(
        method="DELETE",
        path=PROVIDER_PATH,
        operation_id="deleteModelProviderConfig",
        handler=delete_provider,
        path_ids=PROVIDER,
        responses={204: None},
    ),
    Route(
        method="GET",
        path=f"{PROVIDER_PATH}/model-catalog",
        operation_id="getModelCatalog",
        handler=get_catalog,
        path_ids=PROVIDER,
        responses={200: ModelCatalog},
    ),
)
