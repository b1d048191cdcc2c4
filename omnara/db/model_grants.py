"""What projects may use of an organization's models, and within which limits."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.listing import ListOrder
from omnara.db.sqlfiles import Queries

_SQL = Queries("model_configs")


class GrantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a grant narrows; None and empty leave a matter to the model. Sizes in tokens."""

    context_window_tokens: int | None = None
    max_output_tokens: int | None = None
    default_max_output_tokens: int | None = None
    default_cache_retention: str | None = None
    supports_tools: bool | None = None
    supports_reasoning: bool | None = None
    default_reasoning_effort: str | None = None
    supported_reasoning_efforts: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ()
    output_modalities: tuple[str, ...] = ()

    def values(self) -> tuple[object, ...]:
        """Return the parameters of a statement; arrays are lists to the driver."""
        return tuple(list(value) if isinstance(value, tuple) else value for value in msgspec.structs.astuple(self))


class ModelGrantRow(msgspec.Struct, frozen=True):
    """A project's right to use a model."""

    id: UUID
    project_id: UUID
    configured_model_id: UUID
    created_at: datetime
    updated_at: datetime
    limits: GrantLimits


class GrantedModelRow(msgspec.Struct, frozen=True):
    """The model of a listed grant."""

    org_id: UUID
    provider_config_id: UUID
    name: str
    provider_config: str
    created_at: datetime
    updated_at: datetime


async def add(connection: Connection, grant_id: UUID, project_id: UUID, model_id: UUID, limits: GrantLimits) -> bool:
    """Let a project use a locked model; False when it may already."""
    return await connection.fetchval(_SQL["add_grant"], grant_id, project_id, model_id, *limits.values()) is not None


async def find(
    connection: Connection, project_id: UUID, *, grant_id: UUID | None = None, model_id: UUID | None = None
) -> ModelGrantRow | None:
    """Return a project's grant by its id or by its model."""
    row = await connection.fetchrow(_SQL["find_grant"], project_id, grant_id, model_id)
    return None if row is None else _grant(tuple(row))


async def change(connection: Connection, grant_id: UUID, limits: GrantLimits) -> None:
    """Replace the limits of a grant whose model is locked."""
    await connection.execute(_SQL["change_grant"], grant_id, *limits.values())


async def drop(connection: Connection, project_id: UUID, grant_id: UUID) -> bool:
    """Take a model from a project; False when there is no such grant."""
    return await connection.fetchval(_SQL["drop_grant"], project_id, grant_id) is not None


async def list_grants(
    connection: Connection, project_id: UUID, order: ListOrder
) -> list[tuple[str, ModelGrantRow, GrantedModelRow]]:
    """Return a project's grants with sort values and models."""
    rows = [tuple(row) for row in await connection.fetch(_SQL["list_grants"], *order.values(), project_id)]
    return [(row[0], _grant(row[1:16]), GrantedModelRow(*row[16:])) for row in rows]


def _grant(row: tuple[Any, ...]) -> ModelGrantRow:
    names = GrantLimits.__struct_fields__
    values = (tuple(value) if isinstance(value, list) else value for value in row[5:])
    limits: dict[str, Any] = dict(zip(names, values, strict=True))
    columns: list[Any] = [*row[:5], GrantLimits(**limits)]
    return ModelGrantRow(*columns)
