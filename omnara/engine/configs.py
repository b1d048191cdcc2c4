"""Compiling and reading agent configs: from a source text to an immutable row, and back with today's model limits.

Everything that can be wrong with a source is one 400 with sorted path-message pairs. Source: api.md §9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

import msgspec

from omnara.access.principals import Principal
from omnara.access.roles import ProjectAction, ProjectScope
from omnara.db import catalog, configs
from omnara.db.catalog import ModelRow
from omnara.db.configs import ConfigRow, NewConfig
from omnara.db.connection import Connection
from omnara.domain.config import Compiled, Definition, ModelChoice, Source, compiled, decode_definition, sha256_hex
from omnara.domain.config_check import BuiltIn, Draft, Offer, Problem, check_document, describe
from omnara.domain.config_source import SourceError, SourceFormat, read_source
from omnara.domain.model_limits import Effective, Limits, narrow
from omnara.domain.text import clean_text
from omnara.engine.deps import Deps
from omnara.engine.machines.sources import resolve_sources
from omnara.engine.scope import project_in_scope
from omnara.errors import InvalidRequest, NotFound
from omnara.ids import IdKind, encode, new_uuid
from omnara.tools.registry import MACHINE_TOOLS, POOL_TOOLS
from omnara.tools.schema import check_tool_schema

COMPILER_VERSION: Final = "v1"
RECOMMENDED: Final = tuple(name for name in MACHINE_TOOLS if not name.endswith("_file"))
"""The seven process and machine tools. Source: api.md §9."""
_AS_THEY_ARE: Final[Mapping[str, str]] = {}


class ConfigView(msgspec.Struct, frozen=True):
    """A config with its model as it is now, and the limits that hold after every narrowing."""

    row: ConfigRow
    model: ModelRow
    limits: Effective

    @property
    def machine_sources(self) -> tuple[Source, ...]:
        """Where its agents get machines from."""
        return decode_definition(self.row.definition).machine_sources if self._names_machines else ()

    @property
    def missing_machine_tools(self) -> list[str]:
        """Tools that a config with machines should have, and this one has not. Source: api.md §9 (warnings)."""
        if not self._names_machines:
            return []
        tools = decode_definition(self.row.definition).tools
        return [name for name in RECOMMENDED if name not in tools]

    @property
    def _names_machines(self) -> bool:
        return '"machine_sources":' in self.row.definition  # else there is no need to decode it


class CreatedConfig(msgspec.Struct, frozen=True):
    """`created` is False when the project had the same source with the same meaning already."""

    created: bool
    config: ConfigView


async def create_config(
    deps: Deps, p: Principal, project: ProjectScope, source: str, source_format: SourceFormat
) -> CreatedConfig:
    """Compile a source and store it, or find the same one. Own transaction.

    Raises NotFound, Forbidden, InvalidRequest with everything that is wrong.
    """
    project_in_scope(p, project, ProjectAction.MANAGE)
    draft = draft_of(deps, source, source_format)

    async def work(connection: Connection) -> CreatedConfig:
        return await store_draft(deps, connection, project, draft, source, source_format)

    return await deps.db.run(work)


async def get_config(deps: Deps, p: Principal, project: ProjectScope, config_id: UUID) -> ConfigView:
    """Return a config of the project. Raises NotFound, Forbidden."""
    project_in_scope(p, project, ProjectAction.READ)
    async with deps.db.acquire() as connection:
        return await view(connection, project.project_id, config_id)


async def view(connection: Connection, project_id: UUID, config_id: UUID) -> ConfigView:
    """Return a config of a project with its model's present limits. Raises NotFound."""
    row = await configs.find(connection, project_id, config_id)
    if row is None:
        raise NotFound("agent config")
    return await _with_model(connection, row)


def draft_of(
    deps: Deps, source: str, source_format: SourceFormat, *, shown_as: Mapping[str, str] = _AS_THEY_ARE
) -> Draft:
    """Read and check a source without the database. `shown_as` renames paths in messages. Raises InvalidRequest."""
    try:
        document = read_source(source, source_format)
    except SourceError as error:
        raise InvalidRequest(describe([Problem(error.path, error.message)])) from None
    checked = check_document(document, _offer(deps))
    if isinstance(checked, list):
        raise InvalidRequest(describe(Problem(shown_as.get(p.path, p.path), p.message) for p in checked))
    return checked


async def store_draft(
    deps: Deps, connection: Connection, project: ProjectScope, draft: Draft, source: str, source_format: SourceFormat
) -> CreatedConfig:
    """Resolve the model of a draft and store the config in the caller's transaction. Raises InvalidRequest."""
    model, result = await _resolve(deps, connection, project, draft)
    kept_source = clean_text(source)
    new = NewConfig(
        id=new_uuid(),
        org_id=project.org_id,
        project_id=project.project_id,
        source=kept_source,
        source_format=source_format,
        source_hash=sha256_hex(kept_source),
        definition=result.text,
        definition_hash=result.definition_hash,
        instruction_hash=result.instruction_hash,
        configured_model_id=model.configured_model_id,
    )
    created, row = await configs.put(connection, new)
    return CreatedConfig(created, ConfigView(row, model, effective_limits(model, result.definition)))


async def _resolve(
    deps: Deps, connection: Connection, project: ProjectScope, draft: Draft
) -> tuple[ModelRow, Compiled]:
    named = draft.model
    model = await _named(connection, project, named.provider_config, named.name, "model")
    problems = _model_problems(model, draft)
    if problems:
        raise InvalidRequest(describe(problems))
    first = encode(IdKind.CONFIGURED_MODEL, model.configured_model_id)
    choice = ModelChoice(
        configured_model_id=first,
        context_window_tokens=named.context_window_tokens,
        default_max_output_tokens=named.default_max_output_tokens,
        cache_retention=named.cache_retention,
        reasoning=named.reasoning,
        fallback_model_ids=await _fallbacks(connection, project, draft, first),
    )
    sources = await resolve_sources(connection, project, draft.machine_sources, deps.places)
    return model, compiled(Definition("v1", draft.instruction, choice, draft.tools, draft.temperature, sources))


async def _fallbacks(connection: Connection, project: ProjectScope, draft: Draft, first: str) -> tuple[str, ...]:
    """Resolve the further models: each granted, none named twice, each with tools if the config has any."""
    found: list[str] = []
    problems: list[Problem] = []
    for number, named in enumerate(draft.model.fallback_models):
        path = f"model.fallback_models.{number}"
        model = await _named(connection, project, named.provider_config, named.name, path)
        public_id = encode(IdKind.CONFIGURED_MODEL, model.configured_model_id)
        if model.grant_id is None:
            problems.append(Problem(f"{path}.name", "is not granted to this project"))
        elif public_id in (first, *found):
            problems.append(Problem(f"{path}.name", "is named before"))
        elif draft.tools and not model.supports_tools:
            problems.append(Problem(f"{path}.name", "does not support tools"))
        found.append(public_id)
    if problems:
        raise InvalidRequest(describe(problems))
    return tuple(found)


async def _named(connection: Connection, project: ProjectScope, provider_config: str, name: str, path: str) -> ModelRow:
    model = await catalog.model_by_names(connection, project.org_id, provider_config, name, project.project_id)
    if model is not None:
        return model
    if await catalog.find_provider(connection, project.org_id, provider_config) is None:
        raise InvalidRequest(describe([Problem(f"{path}.provider_config", "is not the name of a provider")]))
    raise InvalidRequest(describe([Problem(f"{path}.name", "is not the name of a model of this provider")]))


def _model_problems(model: ModelRow, draft: Draft) -> list[Problem]:
    if model.grant_id is None:
        return [Problem("model.name", "is not granted to this project")]
    allowed = narrow(_of_model(model), _of_grant(model))
    problems: list[Problem] = []
    if draft.tools and not model.supports_tools:
        problems.append(Problem("tools", "the model does not support tools"))
    window, output = draft.model.context_window_tokens, draft.model.default_max_output_tokens
    if window is not None and window > allowed.context_window_tokens:
        problems.append(_too_large("context_window_tokens", allowed.context_window_tokens))
    if output is not None and output > allowed.max_output_tokens:
        problems.append(_too_large("default_max_output_tokens", allowed.max_output_tokens))
    if window is not None and output is not None and output >= window:
        problems.append(Problem("model.default_max_output_tokens", "must be smaller than context_window_tokens"))
    if draft.model.reasoning is not None:
        problems.extend(_reasoning_problems(model, draft.model.reasoning.effort))
    return problems


def _too_large(field: str, largest: int) -> Problem:
    return Problem(f"model.{field}", f"must not be larger than {largest}")


def _reasoning_problems(model: ModelRow, effort: str) -> list[Problem]:
    path = "model.reasoning.effort"
    if not model.supports_reasoning:
        return [Problem(path, "the model does not support reasoning")]
    if model.supported_reasoning_efforts and effort not in model.supported_reasoning_efforts:
        return [Problem(path, f"must be one of {', '.join(sorted(model.supported_reasoning_efforts))}")]
    return []


def _offer(deps: Deps) -> Offer:
    built_in = {
        tool.name: BuiltIn(frozenset(tool.permission_modes), tool.default_permission.mode)
        for tool in deps.registry.values()
    }
    return Offer(
        built_in, lambda schema: [(p.path, p.message) for p in check_tool_schema(schema)], MACHINE_TOOLS, POOL_TOOLS
    )


async def _with_model(connection: Connection, row: ConfigRow) -> ConfigView:
    model = await catalog.granted_model(connection, row.configured_model_id, row.project_id)
    if model is None:
        raise NotFound("configured model")
    return ConfigView(row, model, effective_limits(model, decode_definition(row.definition)))


def effective_limits(model: ModelRow, definition: Definition) -> Effective:
    """Return what holds for a config: model, then grant, then config. Source: api.md §9 (model block)."""
    choice = definition.model
    config = Limits(
        context_window_tokens=choice.context_window_tokens,
        default_max_output_tokens=choice.default_max_output_tokens,
        cache_retention=choice.cache_retention,
        reasoning_effort=None if choice.reasoning is None else choice.reasoning.effort,
    )
    return narrow(_of_model(model), _of_grant(model), config)


def _of_model(model: ModelRow) -> Effective:
    return Effective(
        context_window_tokens=model.context_window_tokens,
        max_output_tokens=model.max_output_tokens,
        default_max_output_tokens=model.default_max_output_tokens,
        cache_retention=model.default_cache_retention,
        reasoning_effort=model.default_reasoning_effort,
    )


def _of_grant(model: ModelRow) -> Limits:
    return Limits(
        context_window_tokens=model.grant_context_window,
        max_output_tokens=model.grant_max_output,
        default_max_output_tokens=model.grant_default_max_output,
        cache_retention=model.grant_cache_retention,
        reasoning_effort=model.grant_reasoning_effort,
    )
