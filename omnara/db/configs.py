"""Compiled agent configs: immutable rows, one per meaning and wording in a project."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import msgspec

from omnara.db.connection import Connection
from omnara.db.sqlfiles import Queries

_SQL = Queries("configs")


class ConfigRow(msgspec.Struct, frozen=True):
    """A compiled config. `definition` is the JSON text of `omnara.domain.config.Definition`."""

    id: UUID
    org_id: UUID
    project_id: UUID
    source: str
    source_format: str
    definition: str
    definition_hash: str
    instruction_hash: str
    configured_model_id: UUID
    created_at: datetime


class NewConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A config to store, unless it is there already."""

    id: UUID
    org_id: UUID
    project_id: UUID
    source: str
    source_format: str
    source_hash: str
    definition: str
    definition_hash: str
    instruction_hash: str
    configured_model_id: UUID


async def put(connection: Connection, new: NewConfig) -> tuple[bool, ConfigRow]:
    """Store a config or find the same one; return whether it is new, and the row.

    The look-up runs as a statement of its own, so that it sees what a concurrent writer has just committed.
    """
    row = await connection.fetchrow(_SQL["insert_config"], *msgspec.structs.astuple(new))
    if row is not None:
        return True, ConfigRow(*row)
    row = await connection.fetchrow(
        _SQL["find_same_config"], new.project_id, new.definition_hash, new.source_format, new.source_hash
    )
    assert row is not None
    return False, ConfigRow(*row)


async def find(connection: Connection, project_id: UUID, config_id: UUID) -> ConfigRow | None:
    """Return a config of this project."""
    row = await connection.fetchrow(_SQL["find_config"], config_id, project_id)
    return None if row is None else ConfigRow(*row)
