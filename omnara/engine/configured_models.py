"""Configured models by API: a name for a provider's model, with facts that change by revision only.

An agent asks for the current revision at each step, so a new one reaches its next call within the catalogue's second.
Source: api.md §8, §14; contract (CreateConfiguredModelRequest, UpdateConfiguredModelRequest).
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import OrgAction
from omnara.db import catalog, model_configs
from omnara.db.catalog import ModelFacts
from omnara.db.connection import Connection
from omnara.db.model_configs import ConfiguredModelRow
from omnara.domain.text import has_controls
from omnara.engine.deps import Deps
from omnara.engine.model_providers import found_provider
from omnara.engine.naming import checked_name
from omnara.engine.reads import Page, TimeKey
from omnara.engine.scope import org_in_scope
from omnara.errors import Conflict, InvalidRequest, NotFound
from omnara.ids import new_uuid

MAX_MODELS: Final = 10_000
"""Per organization. Source: api.md §8 (resource caps)."""

MAX_OUTPUT_TOKENS: Final = 8192
DEFAULT_OUTPUT_TOKENS: Final = 4096
"""What holds where a request says nothing, for windows that are large enough. Source: api.md §14."""

MAX_SLUG_CHARS: Final = 256


class CreatedModel(msgspec.Struct, frozen=True):
    """A configured model; not `created` when one with these facts was there."""

    created: bool
    row: ConfiguredModelRow


def sizes(context: int, most: int | None, usual: int | None) -> tuple[int, int]:
    """Return the output limits of a new model: the most, and what a request asks for. Source: api.md §14."""
    ceiling = min(MAX_OUTPUT_TOKENS, context // 2) if most is None else most
    return ceiling, min(DEFAULT_OUTPUT_TOKENS, ceiling) if usual is None else usual


async def create_model(
    deps: Deps, p: Principal, org_id: UUID, provider_id: UUID, name: str, facts: ModelFacts
) -> CreatedModel:
    """Store a configured model with its first revision. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest, Conflict for a name with other facts or at the cap.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown = checked_name(name)

    async def work(connection: Connection) -> CreatedModel:
        await model_configs.lock_provider(connection, org_id, provider_id)
        provider = await found_provider(connection, org_id, provider_id)
        check_facts(facts, provider.api_format)
        existing = await model_configs.model_by_name(connection, provider_id, shown)
        if existing is not None:
            row = await _found(connection, org_id, provider_id, existing)
            if row.facts != facts:
                raise Conflict("a model of this name has other settings")
            return CreatedModel(False, row)
        if await model_configs.count_models(connection, org_id) >= MAX_MODELS:
            raise Conflict(f"an organization may have {MAX_MODELS} configured models")
        ids = (new_uuid(), new_uuid())
        model_id, _ = await catalog.put_model(connection, org_id, provider_id, shown, facts, ids)
        return CreatedModel(True, await _found(connection, org_id, provider_id, model_id))

    return await deps.db.run(work)


async def list_models(
    deps: Deps, p: Principal, org_id: UUID, provider_id: UUID, *, after: TimeKey | None, limit: int
) -> Page[ConfiguredModelRow]:
    """Return a provider's configured models, newest first."""
    org_in_scope(p, org_id, OrgAction.MANAGE)
    async with deps.db.acquire() as connection:
        await found_provider(connection, org_id, provider_id)
        rows = await model_configs.list_models(connection, provider_id, after, limit + 1)
    return Page(rows[:limit], len(rows) > limit)


async def update_model(
    deps: Deps,
    p: Principal,
    org_id: UUID,
    provider_id: UUID,
    model_id: UUID,
    name: str | None,
    changes: dict[str, Any],
) -> ConfiguredModelRow:
    """Rename a configured model, or give it a revision with some facts changed; the same facts make none.

    Own transaction. Raises NotFound, Forbidden, InvalidRequest, Conflict for a taken name.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)
    shown = None if name is None else checked_name(name)

    async def work(connection: Connection) -> ConfiguredModelRow:
        row = await _locked(connection, org_id, provider_id, model_id)
        facts = msgspec.structs.replace(row.facts, **changes)
        check_facts(facts, row.api_format)
        renamed = shown is None or shown == row.name or await model_configs.rename_model(connection, model_id, shown)
        if not renamed:
            raise Conflict("a model of this name exists")
        if facts != row.facts:
            await catalog.insert_revision(connection, model_id, new_uuid(), facts)
        return await _found(connection, org_id, provider_id, model_id)

    return await deps.db.run(work)


async def delete_model(deps: Deps, p: Principal, org_id: UUID, provider_id: UUID, model_id: UUID) -> None:
    """Delete a configured model. Own transaction.

    Raises NotFound, Forbidden, Conflict while a project may use it or when the environment keeps its provider.
    """
    org_in_scope(p, org_id, OrgAction.MANAGE)

    async def work(connection: Connection) -> None:
        row = await _locked(connection, org_id, provider_id, model_id)
        if row.origin == "environment":
            raise Conflict("the environment of the server keeps this model")
        if await model_configs.has_grants(connection, model_id):
            raise Conflict("projects have grants for the model")
        await model_configs.delete_model(connection, model_id)

    await deps.db.run(work)


def check_facts(facts: ModelFacts, api_format: str) -> None:
    """Refuse facts that contradict each other. Raises InvalidRequest."""
    slug, usual = facts.provider_model_slug, facts.default_max_output_tokens
    if not slug.strip() or slug != slug.strip() or has_controls(slug) or len(slug) > MAX_SLUG_CHARS:
        raise InvalidRequest(f"provider_model_slug has 1 to {MAX_SLUG_CHARS} characters and no blanks around it")
    if facts.max_output_tokens >= facts.context_window_tokens:
        raise InvalidRequest("max_output_tokens must be smaller than context_window_tokens")
    if usual is None and api_format == "anthropic_messages":
        raise InvalidRequest("default_max_output_tokens is needed for anthropic-messages")
    if usual is not None and usual > facts.max_output_tokens:
        raise InvalidRequest("default_max_output_tokens must not be larger than max_output_tokens")
    check_reasoning(
        supported=facts.supports_reasoning,
        effort=facts.default_reasoning_effort,
        efforts=facts.supported_reasoning_efforts,
    )


def check_reasoning(*, supported: bool, effort: str, efforts: tuple[str, ...]) -> None:
    """Refuse efforts that nobody could use. Raises InvalidRequest."""
    if not supported and (effort or efforts):
        raise InvalidRequest("reasoning efforts need supports_reasoning")
    if effort and efforts and effort not in efforts:
        raise InvalidRequest("default_reasoning_effort must be one of supported_reasoning_efforts")


async def _locked(connection: Connection, org_id: UUID, provider_id: UUID, model_id: UUID) -> ConfiguredModelRow:
    await model_configs.lock_model(connection, org_id, model_id)
    return await _found(connection, org_id, provider_id, model_id)


async def _found(connection: Connection, org_id: UUID, provider_id: UUID, model_id: UUID) -> ConfiguredModelRow:
    row = await model_configs.find_model(connection, org_id, model_id)
    if row is None or row.provider_config_id != provider_id:
        raise NotFound("configured model")
    return row
