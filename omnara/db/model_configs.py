"""Provider configs and configured models as the API makes, shows and changes them. Grants are in `model_grants`."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from omnara.db.catalog import ModelFacts
from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.sqlfiles import Queries

_SQL = Queries("model_configs")


class ProviderConfigRow(msgspec.Struct, frozen=True):
    """A provider config. `own_secret`: its key is one that the server keeps for it, or it has none."""

    id: UUID
    org_id: UUID
    name: str
    origin: str
    api_format: str
    api_variant: str
    base_url: str
    request_path: str
    auth_kind: str
    auth_header: str | None
    secret_id: UUID | None
    own_secret: bool
    request_timeout_ms: int
    created_at: datetime
    updated_at: datetime


class NewProviderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A provider config to insert, in the order of the statement's parameters."""

    id: UUID
    org_id: UUID
    name: str
    preset: str | None
    api_format: str
    api_variant: str
    base_url: str
    request_path: str
    auth_kind: str
    auth_header: str | None
    secret_id: UUID
    request_timeout_ms: int


class ConfiguredModelRow(msgspec.Struct, frozen=True):
    """A configured model with the facts of its current revision."""

    id: UUID
    org_id: UUID
    provider_config_id: UUID
    name: str
    provider_config: str
    origin: str
    api_format: str
    current_revision_id: UUID
    created_at: datetime
    updated_at: datetime
    revision_created_at: datetime
    facts: ModelFacts


async def add_provider(connection: Connection, new: NewProviderConfig) -> bool:
    """Insert a provider config; False when its name is taken."""
    return await connection.fetchval(_SQL["add_provider"], *msgspec.structs.astuple(new)) is not None


async def find_provider(connection: Connection, org_id: UUID, provider_id: UUID) -> ProviderConfigRow | None:
    """Return a provider config."""
    row = await connection.fetchrow(_SQL["find_provider"], org_id, provider_id)
    return None if row is None else ProviderConfigRow(*row)


async def provider_by_name(connection: Connection, org_id: UUID, name: str) -> ProviderConfigRow | None:
    """Return a provider config by name."""
    row = await connection.fetchrow(_SQL["provider_by_name"], org_id, name)
    return None if row is None else ProviderConfigRow(*row)


async def count_providers(connection: Connection, org_id: UUID) -> int:
    """Return how many provider configs an organization has."""
    found: int = await connection.fetchval(_SQL["count_providers"], org_id)
    return found


async def lock_provider(connection: Connection, org_id: UUID, provider_id: UUID) -> bool:
    """Lock a provider config until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["lock_provider"], org_id, provider_id) is not None


async def list_providers(connection: Connection, org_id: UUID, order: ListOrder) -> list[tuple[str, ProviderConfigRow]]:
    """Return provider configs with their sort values."""
    rows = await connection.fetch(_SQL["list_providers"], *order.values(), org_id)
    return [(row[0], ProviderConfigRow(*row[1:])) for row in rows]


async def change_provider(connection: Connection, row: ProviderConfigRow) -> None:
    """Write back what may change of a locked provider config."""
    await connection.execute(
        _SQL["change_provider"],
        row.id,
        row.base_url,
        row.request_path,
        row.auth_kind,
        row.auth_header,
        row.secret_id,
        row.request_timeout_ms,
    )


async def has_models(connection: Connection, provider_id: UUID) -> bool:
    """Whether a locked provider config has configured models."""
    return bool(await connection.fetchval(_SQL["has_models"], provider_id))


async def delete_provider(connection: Connection, provider_id: UUID) -> None:
    """Hide a locked provider config."""
    await connection.execute(_SQL["mark_provider_deleted"], provider_id)


# --- models -----------------------------------------------------------------------------------------------


async def find_model(connection: Connection, org_id: UUID, model_id: UUID) -> ConfiguredModelRow | None:
    """Return a configured model of an organization."""
    row = await connection.fetchrow(_SQL["find_model"], org_id, model_id)
    return None if row is None else _model(row)


async def model_by_name(connection: Connection, provider_id: UUID, name: str) -> UUID | None:
    """Return a provider's configured model by name."""
    found: UUID | None = await connection.fetchval(_SQL["model_by_name"], provider_id, name)
    return found


async def count_models(connection: Connection, org_id: UUID) -> int:
    """Return how many configured models an organization has."""
    found: int = await connection.fetchval(_SQL["count_models"], org_id)
    return found


async def lock_model(connection: Connection, org_id: UUID, model_id: UUID) -> bool:
    """Lock a configured model until the transaction ends; False when there is none."""
    return await connection.fetchval(_SQL["lock_model"], org_id, model_id) is not None


async def list_models(
    connection: Connection, provider_id: UUID, after: tuple[datetime, UUID] | None, limit: int
) -> list[ConfiguredModelRow]:
    """Return a provider's configured models, newest first, after a (created_at, id) key."""
    time, last_id = after or (None, None)
    return [_model(row) for row in await connection.fetch(_SQL["list_models"], provider_id, time, last_id, limit)]


async def rename_model(connection: Connection, model_id: UUID, name: str) -> bool:
    """Rename a locked configured model; False, and the transaction is lost, when the name is taken."""
    try:
        await connection.execute(_SQL["rename_model"], model_id, name)
    except asyncpg.UniqueViolationError:
        return False
    return True


async def has_grants(connection: Connection, model_id: UUID) -> bool:
    """Whether any project may use a locked configured model."""
    return bool(await connection.fetchval(_SQL["has_grants"], model_id))


async def delete_model(connection: Connection, model_id: UUID) -> None:
    """Hide a locked configured model; agents that used it keep its history."""
    await connection.execute(_SQL["mark_model_deleted"], model_id)


def _model(row: asyncpg.Record) -> ConfiguredModelRow:
    facts = ModelFacts(
        provider_model_slug=row["provider_model_slug"],
        context_window_tokens=row["context_window_tokens"],
        max_output_tokens=row["max_output_tokens"],
        default_max_output_tokens=row["default_max_output_tokens"],
        default_cache_retention=row["default_cache_retention"],
        supports_tools=row["supports_tools"],
        supports_reasoning=row["supports_reasoning"],
        default_reasoning_effort=row["default_reasoning_effort"],
        supported_reasoning_efforts=tuple(row["supported_reasoning_efforts"]),
        input_modalities=tuple(row["input_modalities"]),
        output_modalities=tuple(row["output_modalities"]),
        api_variant_options=row["api_variant_options"],
    )
    columns: list[Any] = [*list(row)[:11], facts]
    return ConfiguredModelRow(*columns)
