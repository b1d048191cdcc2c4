"""Provider configs, configured models and grants, as they are made, changed and shown."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from omnara.api.omnara.types.scalars import (
    ConfiguredModelID,
    ConfiguredModelRevisionID,
    JSONObject,
    ModelAPIFormat,
    ModelCacheRetention,
    ModelProviderConfigID,
    NonEmpty,
    OrganizationID,
    ProjectID,
    ProjectModelGrantID,
    SecretID,
    Timestamp,
    Wire,
)
from omnara.api.omnara.types.secrets import ManagementKind
from omnara.api.types import Changes

ModelProviderAuthKind = Literal["bearer_token", "api_key_header"]
ModelProviderAPIVariant = Literal["default", "openrouter", "bedrock"]
Count = Annotated[int, Meta(ge=1, le=2147483647)]
Window = Annotated[int, Meta(ge=2, le=2147483647)]
EndpointPath = Annotated[str, Meta(min_length=1, pattern="^/")]


class AuthOptions(Wire, frozen=True, kw_only=True):
    """Where a key is put."""

    header_name: NonEmpty | UnsetType = UNSET


class CreateModelProviderConfigRequest(Wire, frozen=True, kw_only=True):
    """A new provider config: a preset, or an endpoint in detail."""

    name: NonEmpty
    preset: Literal["openai", "openrouter", "anthropic"] | UnsetType = UNSET
    api_format: ModelAPIFormat | UnsetType = UNSET
    api_variant: ModelProviderAPIVariant | UnsetType = UNSET
    base_url: NonEmpty | UnsetType = UNSET
    endpoint_path: EndpointPath | UnsetType = UNSET
    request_timeout_ms: Count | UnsetType = UNSET
    auth_kind: ModelProviderAuthKind | UnsetType = UNSET
    auth_options: AuthOptions | UnsetType = UNSET
    credential_secret_id: SecretID


class UpdateModelProviderConfigRequest(Wire, frozen=True, kw_only=True):
    """What is to change of a provider config."""

    base_url: NonEmpty | UnsetType = UNSET
    endpoint_path: EndpointPath | UnsetType = UNSET
    request_timeout_ms: Count | UnsetType = UNSET
    auth_kind: ModelProviderAuthKind | UnsetType = UNSET
    auth_options: AuthOptions | UnsetType = UNSET
    credential_secret_id: SecretID | UnsetType = UNSET


class ModelProviderConfig(Wire, frozen=True, kw_only=True):
    """A provider config."""

    id: ModelProviderConfigID
    org_id: OrganizationID
    management_kind: ManagementKind
    name: str
    api_format: ModelAPIFormat
    api_variant: str
    base_url: str
    endpoint_path: str
    request_timeout_ms: int
    auth_kind: ModelProviderAuthKind
    auth_options: AuthOptions
    credential_secret_id: SecretID
    created_at: Timestamp
    updated_at: Timestamp


class ModelProviderConfigList(Wire, frozen=True, kw_only=True):
    """A page of provider configs."""

    data: list[ModelProviderConfig]
    next_cursor: str | None


class DiscoveredProviderModel(Wire, frozen=True, kw_only=True):
    """A model that a provider offers."""

    slug: str
    display_name: str | UnsetType = UNSET
    context_window_tokens: Window | UnsetType = UNSET
    max_output_tokens: Count | UnsetType = UNSET


class ModelCatalog(Wire, frozen=True, kw_only=True):
    """What a provider offers, or why that is not known."""

    status: Literal["ok", "failed"]
    models: list[DiscoveredProviderModel] | UnsetType = UNSET
    error: str | UnsetType = UNSET


class CreateModelProviderConfigResponse(Wire, frozen=True, kw_only=True):
    """A provider config and what it offers."""

    config: ModelProviderConfig
    model_catalog: ModelCatalog


class CreateConfiguredModelRequest(Wire, frozen=True, kw_only=True):
    """A new configured model."""

    name: NonEmpty
    provider_model_slug: NonEmpty
    context_window_tokens: Window
    max_output_tokens: Count | UnsetType = UNSET
    default_max_output_tokens: Count | UnsetType = UNSET
    default_cache_retention: ModelCacheRetention | UnsetType = UNSET
    supports_tools: bool = True
    supports_reasoning: bool = False
    default_reasoning_effort: str | UnsetType = UNSET
    supported_reasoning_efforts: list[str] | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET
    output_modalities: list[str] | UnsetType = UNSET
    api_variant_options: JSONObject | UnsetType = UNSET


class UpdateConfiguredModelRequest(Wire, frozen=True, kw_only=True):
    """What is to change of a configured model."""

    name: NonEmpty | UnsetType = UNSET
    provider_model_slug: NonEmpty | UnsetType = UNSET
    context_window_tokens: Window | UnsetType = UNSET
    max_output_tokens: Count | UnsetType = UNSET
    default_max_output_tokens: (
        Annotated[int | None, Meta(extra_json_schema={"minimum": 1, "maximum": 2147483647})] | UnsetType
    ) = UNSET
    default_cache_retention: ModelCacheRetention | UnsetType = UNSET
    supports_tools: bool | UnsetType = UNSET
    supports_reasoning: bool | UnsetType = UNSET
    default_reasoning_effort: str | UnsetType = UNSET
    supported_reasoning_efforts: list[str] | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET
    output_modalities: list[str] | UnsetType = UNSET
    api_variant_options: JSONObject | UnsetType = UNSET


class ConfiguredModel(Wire, frozen=True, kw_only=True):
    """A configured model with its current revision."""

    id: ConfiguredModelID
    org_id: OrganizationID
    model_provider_config_id: ModelProviderConfigID
    management_kind: ManagementKind
    name: str
    current_revision_id: ConfiguredModelRevisionID
    provider_model_slug: str
    context_window_tokens: int
    max_output_tokens: int
    default_max_output_tokens: int | UnsetType | None = UNSET
    default_cache_retention: ModelCacheRetention
    supports_tools: bool
    supports_reasoning: bool
    default_reasoning_effort: str
    supported_reasoning_efforts: list[str]
    input_modalities: list[str]
    output_modalities: list[str]
    api_variant_options: JSONObject
    created_at: Timestamp
    updated_at: Timestamp
    revision_created_at: Timestamp


class ConfiguredModelList(Wire, frozen=True, kw_only=True):
    """A page of configured models, newest first."""

    data: list[ConfiguredModel]
    next_cursor: str | None


class CreateProjectModelGrantRequest(Wire, frozen=True, kw_only=True):
    """Which model a project is to use, within which limits."""

    configured_model_id: ConfiguredModelID
    context_window_tokens: Window | UnsetType = UNSET
    max_output_tokens: Count | UnsetType = UNSET
    default_max_output_tokens: Count | UnsetType = UNSET
    default_cache_retention: ModelCacheRetention | UnsetType = UNSET
    supports_tools: bool | UnsetType = UNSET
    supports_reasoning: bool | UnsetType = UNSET
    default_reasoning_effort: str | UnsetType = UNSET
    supported_reasoning_efforts: list[str] | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET
    output_modalities: list[str] | UnsetType = UNSET


class UpdateProjectModelGrantRequest(Changes, frozen=True, kw_only=True):
    """What is to change of a grant; null and empty lists leave a matter to the model again."""

    context_window_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] | UnsetType = UNSET
    max_output_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] | UnsetType = UNSET
    default_max_output_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] | UnsetType = UNSET
    default_cache_retention: ModelCacheRetention | UnsetType | None = UNSET
    supports_tools: bool | UnsetType | None = UNSET
    supports_reasoning: bool | UnsetType | None = UNSET
    default_reasoning_effort: str | UnsetType | None = UNSET
    supported_reasoning_efforts: list[str] | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET
    output_modalities: list[str] | UnsetType = UNSET


class ProjectModelGrant(Wire, frozen=True, kw_only=True):
    """A project's right to use a model."""

    id: ProjectModelGrantID
    org_id: OrganizationID
    project_id: ProjectID
    configured_model_id: ConfiguredModelID
    context_window_tokens: int | UnsetType | None = UNSET
    max_output_tokens: int | UnsetType | None = UNSET
    default_max_output_tokens: int | UnsetType | None = UNSET
    default_cache_retention: ModelCacheRetention | UnsetType = UNSET
    supports_tools: bool | UnsetType | None = UNSET
    supports_reasoning: bool | UnsetType | None = UNSET
    default_reasoning_effort: str | UnsetType = UNSET
    supported_reasoning_efforts: list[str]
    input_modalities: list[str]
    output_modalities: list[str]
    created_at: Timestamp
    updated_at: Timestamp


class ProjectModelGrantEnvelope(Wire, frozen=True, kw_only=True):
    """A grant."""

    grant: ProjectModelGrant


class ConfiguredModelSummary(Wire, frozen=True, kw_only=True):
    """A model as a grant shows it."""

    id: ConfiguredModelID
    org_id: OrganizationID
    model_provider_config_id: ModelProviderConfigID
    name: str
    provider_config: str
    created_at: Timestamp
    updated_at: Timestamp


class ProjectModelGrantListItem(Wire, frozen=True, kw_only=True):
    """A grant and its model."""

    grant: ProjectModelGrant
    model: ConfiguredModelSummary


class ListProjectModelGrantsResponse(Wire, frozen=True, kw_only=True):
    """A page of grants."""

    data: list[ProjectModelGrantListItem]
    next_cursor: str | None
