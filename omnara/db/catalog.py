"""The model catalogue: provider config, configured model, immutable revision, project grant."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("catalog")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a revision says about a model. Sizes in tokens; `api_variant_options` is JSON text.

    No modalities: nobody stated them.
    """

    provider_model_slug: str
    context_window_tokens: int
    max_output_tokens: int
    default_max_output_tokens: int | None
    default_cache_retention: str = "short"
    supports_tools: bool = True
    supports_reasoning: bool = False
    default_reasoning_effort: str = ""
    supported_reasoning_efforts: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ()
    output_modalities: tuple[str, ...] = ()
    api_variant_options: str = "{}"


class ModelRow(msgspec.Struct, frozen=True):
    """A configured model with its provider, current revision and (`grant_id` not None) the project's grant."""

    configured_model_id: UUID
    name: str
    provider_config_id: UUID
    provider_config: str
    origin: str
    api_format: str
    api_variant: str
    base_url: str
    request_path: str
    auth_kind: str
    auth_header: str | None
    secret_id: UUID | None
    request_timeout_ms: int
    revision_id: UUID
    provider_model_slug: str
    context_window_tokens: int
    max_output_tokens: int
    default_max_output_tokens: int | None
    default_cache_retention: str
    supports_tools: bool
    supports_reasoning: bool
    default_reasoning_effort: str
    supported_reasoning_efforts: list[str]
    input_modalities: list[str]
    output_modalities: list[str]
    api_variant_options: str
    grant_id: UUID | None
    grant_context_window: int | None
    grant_max_output: int | None
    grant_default_max_output: int | None
    grant_cache_retention: str | None
    grant_reasoning_effort: str | None


class GrantedName(msgspec.Struct, frozen=True):
    """What a project may call a model."""

    provider_config: str
    name: str
    slug: str


class ProviderRow(msgspec.Struct, frozen=True):
    """A provider config."""

    id: UUID
    org_id: UUID
    name: str
    api_format: str
    base_url: str
    request_path: str
    auth_kind: str
    auth_header: str | None
    secret_id: UUID | None
    origin: str


class NewProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider config to insert."""

    id: UUID
    org_id: UUID
    name: str
    preset: str | None
    api_format: str
    base_url: str
    request_path: str
    auth_kind: str
    secret_id: UUID | None
    origin: str


class ListedModel(msgspec.Struct, frozen=True):
    """A model as `omnara models list` shows it."""

    provider_config: str
    name: str
    provider_model_slug: str
    api_format: str
    base_url: str
    origin: str
    context_window_tokens: int
    max_output_tokens: int
    supports_tools: bool
    supports_reasoning: bool
    grants: int


async def granted_model(connection: Connection, model_id: UUID, project_id: UUID) -> ModelRow | None:
    """Return a configured model as a project sees it, deleted or not: agents outlive catalogue entries."""
    row = await connection.fetchrow(_SQL["granted_model"], model_id, project_id)
    return None if row is None else ModelRow(*row)


async def model_by_names(
    connection: Connection, org_id: UUID, provider: str, name: str, project_id: UUID
) -> ModelRow | None:
    """Return a configured model by the two names that a config uses."""
    row = await connection.fetchrow(_SQL["model_by_names"], org_id, provider, name, project_id)
    return None if row is None else ModelRow(*row)


async def granted_names(connection: Connection, project_id: UUID) -> list[GrantedName]:
    """Return the models that a project may use, by provider and name."""
    return [GrantedName(*row) for row in await connection.fetch(_SQL["granted_names"], project_id)]


async def find_provider(connection: Connection, org_id: UUID, name: str) -> ProviderRow | None:
    """Return a provider config by name."""
    row = await connection.fetchrow(_SQL["find_provider"], org_id, name)
    return None if row is None else ProviderRow(*row)


async def insert_provider(connection: Connection, new: NewProvider) -> None:
    """Insert a provider config."""
    await connection.execute(_SQL["insert_provider"], *msgspec.structs.astuple(new))


async def update_provider(connection: Connection, provider: ProviderRow) -> None:
    """Write back what the environment may change; nothing happens when nothing did."""
    await connection.execute(
        _SQL["update_provider"],
        provider.id,
        provider.base_url,
        provider.request_path,
        provider.secret_id,
        provider.api_format,
        provider.auth_kind,
    )


async def put_model(
    connection: Connection,
    org_id: UUID,
    provider_id: UUID,
    name: str,
    facts: ModelFacts,
    new_ids: tuple[UUID, UUID],
    *,
    keep_existing: bool = False,
) -> tuple[UUID, bool]:
    """Make a configured model, or give an existing one a new revision when its facts differ.

    Return its id, and whether it is new.

    `keep_existing` leaves an existing one as somebody else set it. `new_ids` are for the model and the revision.
    Call inside a transaction.
    """
    model_id, revision_id = new_ids
    inserted = await connection.fetchrow(_SQL["insert_model"], model_id, org_id, provider_id, name, revision_id)
    if inserted is None:
        found = await connection.fetchrow(_SQL["find_model"], provider_id, name)
        assert found is not None
        existing: UUID = found["id"]
        model_id = existing
        if keep_existing or await current_facts(connection, model_id) == facts:
            return model_id, False
    await insert_revision(connection, model_id, revision_id, facts)
    return model_id, inserted is not None


async def insert_revision(connection: Connection, model_id: UUID, revision_id: UUID, facts: ModelFacts) -> None:
    """Insert the next revision of a configured model and make it the current one."""
    await connection.execute(
        _SQL["insert_revision"],
        revision_id,
        model_id,
        facts.provider_model_slug,
        facts.context_window_tokens,
        facts.max_output_tokens,
        facts.default_max_output_tokens,
        facts.default_cache_retention,
        facts.supports_tools,
        facts.supports_reasoning,
        facts.default_reasoning_effort,
        list(facts.supported_reasoning_efforts),
        list(facts.input_modalities),
        list(facts.output_modalities),
        facts.api_variant_options,
    )
    await connection.execute(_SQL["set_current_revision"], model_id, revision_id)


async def current_facts(connection: Connection, model_id: UUID) -> ModelFacts | None:
    """Return the facts of a model's current revision."""
    row = await connection.fetchrow(_SQL["current_revision"], model_id)
    if row is None:
        return None
    return ModelFacts(
        provider_model_slug=row[0],
        context_window_tokens=row[1],
        max_output_tokens=row[2],
        default_max_output_tokens=row[3],
        default_cache_retention=row[4],
        supports_tools=row[5],
        supports_reasoning=row[6],
        default_reasoning_effort=row[7],
        supported_reasoning_efforts=tuple(row[8]),
        input_modalities=tuple(row[9]),
        output_modalities=tuple(row[10]),
        api_variant_options=row[11],
    )


async def grant(connection: Connection, new_id: UUID, project_id: UUID, model_id: UUID) -> None:
    """Let a project use a model; nothing happens when it may already."""
    await connection.execute(_SQL["grant_to_project"], new_id, project_id, model_id)


async def org_projects(connection: Connection, org_id: UUID) -> Iterable[UUID]:
    """Return every project of an organization."""
    return [row[0] for row in await connection.fetch(_SQL["org_projects"], org_id)]


async def list_models(connection: Connection, org_id: UUID) -> list[ListedModel]:
    """Return an organization's models by provider and name."""
    return [ListedModel(*row) for row in await connection.fetch(_SQL["list_models"], org_id)]
