"""Routes of configured models."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from omnara.api.body import check_depth
from omnara.api.cursors import Binding
from omnara.api.omnara.decode import PageQuery, given
from omnara.api.omnara.model_providers import PROVIDER, PROVIDER_PATH
from omnara.api.omnara.tools import next_cursor, time_key
from omnara.api.omnara.types.models import (
    ConfiguredModel,
    ConfiguredModelList,
    CreateConfiguredModelRequest,
    UpdateConfiguredModelRequest,
)
from omnara.api.omnara.types.scalars import JSONObject
from omnara.api.routing import Call, Route, no_content, reply
from omnara.db.catalog import ModelFacts
from omnara.db.model_configs import ConfiguredModelRow
from omnara.domain.text import clean
from omnara.engine import configured_models
from omnara.engine.configured_models import sizes
from omnara.errors import ValidationFailed
from omnara.ids import IdKind, encode

MODEL = {**PROVIDER, "configuredModelID": IdKind.CONFIGURED_MODEL}
MODELS_PATH = f"{PROVIDER_PATH}/models"
MODEL_PATH = f"{MODELS_PATH}/{{configuredModelID}}"

_LARGEST: Final = 2147483647
_LISTS: Final = ("supported_reasoning_efforts", "input_modalities", "output_modalities")


def configured_model(row: ConfiguredModelRow) -> ConfiguredModel:
    """A configured model."""
    facts = row.facts
    retention: Any = facts.default_cache_retention
    return ConfiguredModel(
        id=encode(IdKind.CONFIGURED_MODEL, row.id),
        org_id=encode(IdKind.ORG, row.org_id),
        model_provider_config_id=encode(IdKind.PROVIDER_CONFIG, row.provider_config_id),
        management_kind="cluster" if row.origin == "environment" else "tenant",
        name=row.name,
        current_revision_id=encode(IdKind.MODEL_REVISION, row.current_revision_id),
        provider_model_slug=facts.provider_model_slug,
        context_window_tokens=facts.context_window_tokens,
        max_output_tokens=facts.max_output_tokens,
        default_max_output_tokens=facts.default_max_output_tokens,
        default_cache_retention=retention,
        supports_tools=facts.supports_tools,
        supports_reasoning=facts.supports_reasoning,
        default_reasoning_effort=facts.default_reasoning_effort,
        supported_reasoning_efforts=list(facts.supported_reasoning_efforts),
        input_modalities=list(facts.input_modalities),
        output_modalities=list(facts.output_modalities),
        api_variant_options=msgspec.json.decode(facts.api_variant_options),
        created_at=row.created_at,
        updated_at=row.updated_at,
        revision_created_at=row.revision_created_at,
    )


async def create_model(call: Call) -> web.StreamResponse:
    """A new configured model; 200 for the same settings again."""
    body: CreateConfiguredModelRequest = call.body
    most, usual = sizes(
        body.context_window_tokens, given(body.max_output_tokens), given(body.default_max_output_tokens)
    )
    facts = ModelFacts(
        provider_model_slug=clean(body.provider_model_slug),
        context_window_tokens=body.context_window_tokens,
        max_output_tokens=most,
        default_max_output_tokens=usual,
        default_cache_retention=given(body.default_cache_retention) or "short",
        supports_tools=body.supports_tools,
        supports_reasoning=body.supports_reasoning,
        default_reasoning_effort=clean(given(body.default_reasoning_effort) or ""),
        supported_reasoning_efforts=tuple(clean(given(body.supported_reasoning_efforts) or [])),
        input_modalities=tuple(clean(given(body.input_modalities) or [])),
        output_modalities=tuple(clean(given(body.output_modalities) or [])),
        api_variant_options=_options(given(body.api_variant_options) or {}),
    )
    made = await configured_models.create_model(
        call.context.deps, call.principal, call.ids["orgID"], call.ids["modelProviderConfigID"], body.name, facts
    )
    return reply(201 if made.created else 200, configured_model(made.row))


async def list_models(call: Call) -> web.StreamResponse:
    """A page of a provider's models, newest first."""
    query: PageQuery = call.query
    provider_id = call.ids["modelProviderConfigID"]
    binding = Binding("configured_models", (str(provider_id),))
    page = await configured_models.list_models(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        provider_id,
        after=time_key(binding, query),
        limit=query.limit,
    )
    data = [configured_model(row) for row in page.rows]
    return reply(200, ConfiguredModelList(data=data, next_cursor=next_cursor(binding, page.rows, more=page.more)))


async def update_model(call: Call) -> web.StreamResponse:
    """Another name, or a new revision."""
    body: UpdateConfiguredModelRequest = call.body
    row = await configured_models.update_model(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["modelProviderConfigID"],
        call.ids["configuredModelID"],
        given(body.name),
        _changes(body),
    )
    return reply(200, configured_model(row))


async def delete_model(call: Call) -> web.StreamResponse:
    """The end of a configured model."""
    await configured_models.delete_model(
        call.context.deps,
        call.principal,
        call.ids["orgID"],
        call.ids["modelProviderConfigID"],
        call.ids["configuredModelID"],
    )
    return no_content()


def stated(body: Any, *, largest: int | None = None) -> dict[str, Any]:
    """The fields that a body of changes holds, as they are stored; `name` is not among them.

    Raises ValidationFailed for sizes below one or above `largest`, which the type of a nullable number cannot say.
    """
    changes: dict[str, Any] = {}
    for field in body.__struct_fields__:
        value = getattr(body, field)
        if isinstance(value, UnsetType) or field == "name":
            continue
        size = isinstance(value, int) and not isinstance(value, bool)
        if size and (value < 1 or (largest is not None and value > largest)):
            raise ValidationFailed(f"{field} is out of range")
        changes[field] = tuple(clean(value)) if field in _LISTS else clean(value)
    return changes


def _changes(body: UpdateConfiguredModelRequest) -> dict[str, Any]:
    changes = stated(body, largest=_LARGEST)
    if body.api_variant_options is not UNSET:
        changes["api_variant_options"] = _options(changes["api_variant_options"])
    return changes


def _options(options: JSONObject) -> str:
    check_depth(options)
    return msgspec.json.encode(clean(options), order="sorted").decode()


ROUTES: Final = (
    Route(
        method="POST",
        path=MODELS_PATH,
        operation_id="createConfiguredModel",
        handler=create_model,
        path_ids=PROVIDER,
        body=CreateConfiguredModelRequest,
        responses={200: ConfiguredModel, 201: ConfiguredModel},
    ),
    Route(
        method="GET",
        path=MODELS_PATH,
        operation_id="listConfiguredModels",
        handler=list_models,
        path_ids=PROVIDER,
        query=PageQuery,
        responses={200: ConfiguredModelList},
    ),
    Route(
        method="PUT",
        path=MODEL_PATH,
        operation_id="updateConfiguredModel",
        handler=update_model,
        path_ids=MODEL,
        body=UpdateConfiguredModelRequest,
        responses={200: ConfiguredModel},
    ),
    Route(
        method="DELETE",
        path=MODEL_PATH,
        operation_id="deleteConfiguredModel",
        handler=delete_model,
        path_ids=MODEL,
        responses={204: None},
    ),
)
